"""What the generators of models share: a model with its reference, and how a failure is written down."""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mixmesh.errors import MixmeshError
from mixmesh.frontend.trace import Traced, trace
from mixmesh.lang.ir import Program, parse_program
from mixmesh.lang.plan_file import Plan

from .generate import random_source
from .optimizers import OPTIMIZERS
from .plans import interpreted
from .report import Failure, Progress, Report, case_seeds
from .shrink import shrunk
from .source import Source, build
from .steps import Steps, difference, in_float64, is_well_conditioned, single_device
from .world import Answer, Job, World

NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model's text with its graph, and what training it with nothing but PyTorch leaves."""

    kind: str
    seed: int
    source: Source | None  # None for a file
    text: str
    optimizer: str
    want: Steps
    traced: Traced

    def failure(self, what: str, plan: Plan | Program | str = "") -> Failure:
        return failure_of(self.kind, self.seed, self.text, what, self.optimizer, plan)


@contextmanager
def quietly() -> Iterator[None]:
    """In float64, without the warnings of operators that are used as nobody should."""
    with in_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def failure_of(
    kind: str, seed: int, text: str, what: str, optimizer: str = "sgd", plan: Plan | Program | str = ""
) -> Failure:
    """A file with the model, and the plan that it failed under."""
    body = f'{text}\n\n# {what}\nOPTIMIZER = "{optimizer}"\nPLAN = """\\\n{plan}"""\n'
    return Failure(kind, seed, what, body)


def random_case(kind: str, seed: int, report: Report) -> Case | None:
    """The case of a seed; None, and a line in the report, where there is nothing to try."""
    source = random_source(seed)
    return make_case(kind, seed, source, random.Random(seed).choice(sorted(OPTIMIZERS)), report)


def make_case(kind: str, seed: int, source: Source | str, optimizer: str, report: Report) -> Case | None:
    """The case of a model's text; None, and a line in the report, where there is nothing to try."""
    text = str(source)
    try:
        if not is_well_conditioned(lambda: build(text), OPTIMIZERS[optimizer], NUM_STEPS):
            report.add("ill-conditioned")
            return None
        want = single_device(*build(text), OPTIMIZERS[optimizer], NUM_STEPS)
    except (RuntimeError, ValueError, IndexError, TypeError):
        report.add("no model")  # values of another seed do not fit, or nothing can be trained
        return None
    try:
        traced = trace(*build(text))
    except MixmeshError as error:
        report.refuse("refused by trace", str(error))
        return None
    except Exception as error:
        report.add("TRACEBACK", failure_of(kind, seed, text, f"trace: {last_line(error)}"))
        return None
    held = source if isinstance(source, Source) else None
    return Case(kind, seed, held, text, optimizer, want, traced)


def smaller_failure(report: Report, case: Case, attempt: Callable[[Case, Report], None]) -> None:
    """Puts a failure of a smaller model in the place of the report's last one, if ``attempt``, which runs in
    one process, fails for it in the same way."""
    wanted = report.failures[-1].what

    def last_failure(source: Source) -> Failure | None:
        mine = Report(case.kind)
        made = make_case(case.kind, case.seed, source, case.optimizer, mine)
        if made is not None:
            attempt(made, mine)
        fitting = [f for f in mine.failures if kind_of_failure(f.what) == kind_of_failure(wanted)]
        return fitting[-1] if fitting else None

    if case.source is not None and last_failure(case.source) is not None:
        smallest = shrunk(case.source, lambda source: last_failure(source) is not None)
        report.failures[-1] = last_failure(smallest) or report.failures[-1]


def kind_of_failure(what: str) -> str:
    """What two failures have in common that have one cause: the exception, or that numbers differ."""
    if "differs by" in what or "in place of" in what:
        return "numbers"
    return next((word for word in what.split() if word.endswith(("Error:", "Exception:"))), what)


def try_plan(case: Case, plan: Plan | Program, label: str, worlds: Worlds | None, report: Report) -> bool:
    """Runs a plan in one process, and over gloo where there are ``worlds``; whether it was right."""
    what = wrong_in_one_process(case, plan)
    if not what and worlds is not None:
        answer = over_gloo(case, plan, worlds)
        if answer.refused:
            report.refuse("refused over gloo", answer.errors[0])
            return True
        what = answer.errors[0] if answer.errors else difference(answer.steps, case.want)
        what = f"over gloo: {what}" if what else ""
    if not what:
        report.add("right" if worlds is None else "right, over gloo too")
        return True
    outcome = (
        "HANG"
        if "HANG" in what
        else "WRONG"
        if "in place of" in what or "differs by" in what
        else "TRACEBACK"
    )
    what = f"{label}, {case.optimizer}: {what}"
    report.add(outcome, case.failure(what, plan))
    return False


def wrong_in_one_process(case: Case, plan: Plan | Program) -> str:
    """What is wrong with a plan's training, in one line; empty if nothing is."""
    model, batch = build(case.text)
    program, micro_batches = (plan, None) if isinstance(plan, Program) else (plan.program, plan.micro_batches)
    return wrong(
        lambda: interpreted(program, micro_batches, model, batch, OPTIMIZERS[case.optimizer], NUM_STEPS),
        case.want,
    )


def over_gloo(case: Case, plan: Plan | Program, worlds: Worlds) -> Answer:
    world_size = plan.world_size if isinstance(plan, Program) else plan.program.world_size
    return worlds.of(world_size).run(Job(case.text, plan, case.optimizer, NUM_STEPS))


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


def read_plan(text: str) -> Plan | Program:
    """The plan or program of a failure's file."""
    return parse_program(text) if text.startswith("program ") else Plan.parse(text)


class Worlds:
    """Processes for any number of ranks, started when they are first asked for."""

    def __init__(self) -> None:
        self.known: dict[int, World] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_) -> None:
        for world in self.known.values():
            world.close()

    def of(self, world_size: int) -> World:
        return self.known.setdefault(world_size, World(world_size))


def run_replays(
    kind: str,
    replay: Callable[[int, Worlds], Report],
    seed: int,
    until_time_s: float,
    progress: Progress,
) -> Report:
    """Replays case after case until ``time.monotonic()`` is ``until_time_s``."""
    report = Report(kind)
    with Worlds() as worlds:
        for case_seed in case_seeds(seed):
            if time.monotonic() >= until_time_s:
                break
            report.join(replay(case_seed, worlds))
            progress(f"{report.num_cases} cases, {len(report.failures)} failures")
    return report
