"""Random models x planners x skewed shares x optimizers, against the module itself."""

from __future__ import annotations

import random
from functools import partial

from mixmesh.errors import MixmeshError, VerificationError
from mixmesh.lang.check import check_program
from mixmesh.planner import PLANNERS, make_plan

from .cases import Case, Worlds, last_line, quietly, random_case, run_replays, smaller_failure, try_plan
from .plans import random_cluster, skewed
from .report import Progress, Report, silent

KIND = "models"
PLANNERS_PER_MODEL = 4
OVER_GLOO = 0.4  # of the plans
SEARCH_S = 0.1  # for planners that have no end of their own


def run_cases(seed: int, until_time_s: float, progress: Progress = silent) -> Report:
    """Runs cases until ``time.monotonic()`` is ``until_time_s``."""
    return run_replays(KIND, replay, seed, until_time_s, progress)


def replay(case_seed: int, worlds: Worlds | None = None) -> Report:
    """Runs one model with some planners."""
    report, rng = Report(KIND, num_seeds=1), random.Random(case_seed)
    with quietly():
        case = random_case(KIND, case_seed, report)
        if case is not None:
            for planner in rng.sample(PLANNERS, PLANNERS_PER_MODEL):
                attempt_seed = rng.randrange(2**31)
                over_gloo = worlds if rng.random() < OVER_GLOO else None
                try_planner(case, report, planner, attempt_seed, over_gloo)
                if report.failures:
                    attempt = partial(try_planner, planner=planner, attempt_seed=attempt_seed, worlds=None)
                    smaller_failure(report, case, attempt)
                    break
    return report


def try_planner(case: Case, report: Report, planner: str, attempt_seed: int, worlds: Worlds | None) -> None:
    """Plans the case's model by one planner on a random cluster, and runs the plan by its own and by other
    shares."""
    rng = random.Random(attempt_seed)
    cluster = random_cluster(rng)
    try:
        plan = make_plan(
            case.traced, cluster, planner=planner, search_s=None if planner == "auto" else SEARCH_S
        )
    except MixmeshError as error:
        report.refuse("refused by planner", f"{planner}: {error}")
        return
    except Exception as error:
        report.add("TRACEBACK", case.failure(f"{planner}: planning: {last_line(error)}", str(cluster)))
        return
    try:
        check_program(plan.program)
    except VerificationError as error:
        report.add(
            "REFUSED ITS OWN", case.failure(f"{planner}: its plan is not valid: {last_line(error)}", plan)
        )
        return
    for tried in (plan, *skewed(plan, rng)):
        if not try_plan(case, tried, planner, worlds, report):
            return
