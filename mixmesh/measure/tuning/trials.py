"""Trains a few steps of each plan, in turns. Every function here is collective."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...base.timeline import Timeline
from ...errors import MixmeshError
from ...lang.ir import print_program
from ...lang.plan_file import Plan
from ...passes.zero import zero_stage
from ...runtime.accelerator import empty_cache
from ...runtime.allocator import give_back
from ...runtime.comm import default_device
from ...runtime.first_rank import everyones
from ...runtime.recording import typical
from ...runtime.train import RECORDED_STEPS, WARMUP_STEPS, RunReport, train
from ..testbed import enter_device, leave_device

TURN_S = 2.0  # predicted seconds of the counted steps in a turn
LEAST_STEPS, MOST_STEPS = 3, 12
# the first steps of every turn do not count: some are slower, and in the first round some are recorded
UNCOUNTED_STEPS = WARMUP_STEPS + RECORDED_STEPS
# how much slower than the fastest a trial may be to stay: in the first round, in later ones
KEPT_WITHIN = (1.15, 1.07)
PATIENCE = 40  # time-out of a trial's collectives, in predicted steps
OUT_OF_MEMORY = "out of memory"
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 60.0, 300.0

Load = Callable[[], Any]  # makes a job


@dataclass(frozen=True)
class Trial:
    """A plan with the median seconds of its steps in each turn, and a recorded step of typical length, if
    there is one. ``failed`` is the reason why it could not train, or empty."""

    plan: Plan
    turns_s: tuple[float, ...] = ()
    failed: str = ""
    timeline: Timeline | None = None

    @property
    def step_s(self) -> float:
        """The median of the turns; infinite without any turn."""
        return statistics.median(self.turns_s) if self.turns_s and not self.failed else float("inf")

    def after(self, outcome: RunReport | str) -> Trial:
        """The trial with one more turn."""
        if isinstance(outcome, str):
            return replace(self, failed=outcome)
        step = typical(outcome.timelines) if outcome.timelines else self.timeline
        turn_s = statistics.median(outcome.step_s[UNCOUNTED_STEPS:] or outcome.step_s)
        return replace(self, turns_s=(*self.turns_s, turn_s), timeline=step)


def one_round(
    load: Load, trials: Sequence[Trial], *, record: bool = False, say: Callable[[str], None] = lambda _: None
) -> tuple[Trial, ...]:
    """Runs a turn of each trial that has not failed."""
    out = []
    for place, t in enumerate(trials):
        say(f"plan {place + 1} of {len(trials)}")
        out.append(t if t.failed else t.after(turn(load, t.plan, record=record)))
    return tuple(out)


def hopeful(trials: Sequence[Trial], rounds_before: int) -> list[int]:
    """The indices of the trials that are still close to the fastest after ``rounds_before`` rounds."""
    within = KEPT_WITHIN[min(rounds_before, len(KEPT_WITHIN)) - 1]
    least_s = min(t.step_s for t in trials)
    return [n for n, t in enumerate(trials) if not t.failed and t.step_s <= within * least_s]


def turn(load: Load, plan: Plan, *, record: bool = False) -> RunReport | str:
    """Trains some steps of a job from its beginning. Returns the report, or the reason why a rank could not
    train."""
    leave_device()  # so that the threads of new process groups are not throttled
    expected_s = max(plan.predicted_step_s, 1e-3)
    steps = UNCOUNTED_STEPS + max(LEAST_STEPS, min(MOST_STEPS, round(TURN_S / expected_s)))
    timeout_s = max(LEAST_TIMEOUT_S, min(MOST_TIMEOUT_S, PATIENCE * expected_s))
    failure = ""
    report: RunReport | None = None
    try:
        # without a watch, because a rank that fails a trial goes on to the next after fewer collectives
        report = train(
            load(),
            plan,
            steps=steps,
            timeout_s=timeout_s,
            heartbeat_s=0.0,
            record=record,
            on_start=enter_device,
        )
    except torch.OutOfMemoryError:
        failure = OUT_OF_MEMORY
    except MixmeshError as error:  # raised by the program, or by a collective that another rank never reached
        failure = OUT_OF_MEMORY if isinstance(error.__cause__, torch.OutOfMemoryError) else str(error)
    gc.collect()  # frees the model before the next one is made
    empty_cache(default_device())
    give_back()
    failures = [(rank, text) for rank, text in enumerate(everyones(failure)) if text]
    if failures:  # a rank that ran out of memory is the cause of the others' timeouts
        rank, text = min(failures, key=lambda f: (f[1] != OUT_OF_MEMORY, f[0]))
        return f"rank {rank}: {text}"
    return report if report is not None and report.step_s else "the job's data has no batch"


def kind_text(plan: Plan) -> str:
    """Words that distinguish a plan from those of the other trials."""
    program = plan.program
    sums = len({number for number in program.buckets if number is not None})
    moved = sum(i.is_redistribution for i in program.instructions)
    stage = zero_stage(program)
    words = [
        f"{sums} {'sum' if sums == 1 else 'sums'}" if sums else "",
        f"{moved} {'exchange' if moved == 1 else 'exchanges'}" if moved else "",
        "by levels" if program.levels is not None else "",
        f"ZeRO {stage}" if stage else "",
        "pipeline" if plan.order else "",
    ]
    return ", ".join([plan.planner, *filter(None, words)])


def same(one: Plan, two: Plan) -> bool:
    """Whether two plans have the same program and the same micro-batches."""
    if one.micro_batches != two.micro_batches:
        return False
    return print_program(one.program) == print_program(two.program)
