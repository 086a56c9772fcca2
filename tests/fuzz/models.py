"""Random models x planners x skewed shares x optimizers, in one process, against the module itself."""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from mixmesh.errors import MixmeshError
from mixmesh.plan_file import Plan
from mixmesh.planner import make_plan
from mixmesh.planner.make import PROPOSERS
from mixmesh.trace import Traced, trace

from .generate import random_source
from .optimizers import OPTIMIZERS
from .plans import interpreted, random_cluster, skewed
from .report import Failure, Progress, Report, case_seeds, silent
from .source import Source
from .steps import Steps, difference, in_float64, is_well_conditioned, single_device

KIND = "models"
PLANNERS = ("auto", *PROPOSERS)
PLANNERS_PER_MODEL = 4
SEARCH_S = 0.1  # for planners that have no end of their own
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model with its reference, and the plans to hold against it."""

    source: Source
    optimizer: str
    want: Steps
    traced: Traced
    rng: random.Random


def run_cases(seed: int, until_time_s: float, progress: Progress = silent) -> Report:
    """Runs cases until ``time.monotonic()`` is ``until_time_s``."""
    report = Report(KIND)
    for case_seed in case_seeds(seed):
        if time.monotonic() >= until_time_s:
            return report
        report.join(replay(case_seed))
        progress(f"{report.num_cases} cases, {len(report.failures)} failures")
    return report


def replay(case_seed: int) -> Report:
    """Runs one model with some planners."""
    report = Report(KIND)
    with in_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = make_case(case_seed, report)
        if case is not None:
            for planner in case.rng.sample(PLANNERS, PLANNERS_PER_MODEL):
                try_planner(case_seed, case, planner, report)
    return report


def make_case(case_seed: int, report: Report) -> Case | None:
    """The case of a seed; None, and a line in the report, where there is nothing to try."""
    rng = random.Random(case_seed)
    source = random_source(case_seed)
    optimizer = rng.choice(sorted(OPTIMIZERS))
    if not is_well_conditioned(source.build, OPTIMIZERS[optimizer], NUM_STEPS):
        report.add("ill-conditioned")
        return None
    want = single_device(*source.build(), OPTIMIZERS[optimizer], NUM_STEPS)
    try:
        traced = trace(*source.build())
    except MixmeshError:
        report.add("refused by trace")
        return None
    except Exception as error:
        report.add("TRACEBACK", failure(case_seed, source, f"trace: {last_line(error)}"))
        return None
    return Case(source, optimizer, want, traced, rng)


def try_planner(case_seed: int, case: Case, planner: str, report: Report) -> None:
    """Plans the case's model by one planner on a random cluster, and runs the plan by its own and by other
    shares."""
    cluster = random_cluster(case.rng)
    try:
        plan = make_plan(
            case.traced, cluster, planner=planner, search_s=SEARCH_S if planner != "auto" else None
        )
    except MixmeshError:
        report.add("refused by planner")
        return
    except Exception as error:
        what = f"{planner}: planning: {last_line(error)}"
        report.add(
            "TRACEBACK",
            failure(case_seed, case.source, what, f"cluster:\n{cluster}\n{traceback.format_exc()}"),
        )
        return
    for tried in (plan, *skewed(plan, case.rng)):
        what = wrong(lambda tried=tried: run(tried, case), case.want)
        if what:
            what = f"{planner}, {case.optimizer}: {what}"
            report.add(
                "WRONG" if "differ" in what else "TRACEBACK",
                failure(case_seed, case.source, what, str(tried)),
            )
            return
        report.add("right")


def run(plan: Plan, case: Case) -> Steps:
    model, batch = case.source.build()
    return interpreted(plan.program, plan.micro_batches, model, batch, OPTIMIZERS[case.optimizer], NUM_STEPS)


def wrong(run: Callable[[], Steps], want: Steps) -> str:
    """What is wrong with a run, in one line; empty if nothing is."""
    try:
        return difference(run(), want)
    except Exception as error:
        return last_line(error)


def last_line(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def failure(case_seed: int, source: Source, what: str, detail: str = "") -> Failure:
    comment = "\n".join(f"# {line}".rstrip() for line in (what, *detail.splitlines()))
    return Failure(KIND, case_seed, what, f"{source}\n\n{comment}\n")
