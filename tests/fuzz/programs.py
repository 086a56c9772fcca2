"""Random legal programs of random models, in one process and over gloo, against the module itself."""

from __future__ import annotations

import random

from mixmesh.errors import VerificationError
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Program

from .cases import Case, Worlds, last_line, quietly, random_case, run_replays, smaller_failure, try_plan
from .legal import Walk, with_options
from .report import Progress, Report, silent

KIND = "programs"
PROGRAMS_PER_MODEL = 6


def run_cases(seed: int, until_time_s: float, progress: Progress = silent) -> Report:
    """Runs cases until ``time.monotonic()`` is ``until_time_s``."""
    return run_replays(KIND, replay, seed, until_time_s, progress)


def replay(case_seed: int, worlds: Worlds | None = None) -> Report:
    """Runs some programs of one model."""
    report, rng = Report(KIND, num_seeds=1), random.Random(case_seed)
    with quietly():
        case = random_case(KIND, case_seed, report)
        if case is not None:
            seed = rng.randrange(2**31)
            try_programs(case, report, seed, worlds)
            if report.failures:
                smaller_failure(report, case, lambda c, r: try_programs(c, r, seed, None))
    return report


def try_programs(case: Case, report: Report, seed: int, worlds: Worlds | None) -> None:
    """Runs some programs of one model, up to the first that fails."""
    rng = random.Random(seed)
    for _ in range(PROGRAMS_PER_MODEL):
        program = random_program(case, rng, report)
        if program is not None and not try_plan(case, program, "program", worlds, report):
            return


def random_program(case: Case, rng: random.Random, report: Report) -> Program | None:
    """A program that the checker accepts; None, and a line in the report, where it does not."""
    try:
        program = Walk(case.traced.graph, rng.choice((2, 3, 4)), rng).program()
        check_program(program)
        made = with_options(program, rng)
        check_program(made)
        return made
    except VerificationError as error:
        report.refuse("refused by checker", str(error))
    except Exception as error:
        report.add("TRACEBACK", case.failure(f"making a program: {last_line(error)}"))
    return None
