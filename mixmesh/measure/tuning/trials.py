"""Plans that train a few steps in turns. Every function here is collective."""

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

TURN_S = 2.0  # for the steps that count, by prediction
LEAST_STEPS, MOST_STEPS = 3, 12
# before those that count, in every turn: the first few are slower, and some of the first round are recorded
UNCOUNTED_STEPS = WARMUP_STEPS + RECORDED_STEPS
KEPT_WITHIN = (1.15, 1.07)  # times the fastest, after each round; the last one stands for all that follow
PATIENCE = 40  # predicted steps that a collective of a trial may take
OUT_OF_MEMORY = "out of memory"
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 60.0, 300.0

Load = Callable[[], Any]  # makes a job


@dataclass(frozen=True)
class Trial:
    """A plan and the median seconds of its steps in every turn that it had; a recorded step of typical
    length, if one was. ``failed`` says why it could not train, where it could not."""

    plan: Plan
    turns_s: tuple[float, ...] = ()
    failed: str = ""
    timeline: Timeline | None = None

    @property
    def step_s(self) -> float:
        """The median of the turns; infinite without any."""
        return statistics.median(self.turns_s) if self.turns_s and not self.failed else float("inf")

    def after(self, found: RunReport | str) -> Trial:
        """With one turn more."""
        if isinstance(found, str):
            return replace(self, failed=found)
        step = typical(found.timelines) if found.timelines else self.timeline
        took_s = statistics.median(found.step_s[UNCOUNTED_STEPS:] or found.step_s)
        return replace(self, turns_s=(*self.turns_s, took_s), timeline=step)


def one_round(
    load: Load, trials: Sequence[Trial], *, record: bool = False, say: Callable[[str], None] = lambda _: None
) -> tuple[Trial, ...]:
    """A turn for each that has not failed. The cost of one round may be spared in the next (``hopeful``)."""
    out = []
    for place, t in enumerate(trials):
        say(f"plan {place + 1} of {len(trials)}")
        out.append(t if t.failed else t.after(turn(load, t.plan, record=record)))
    return tuple(out)


def hopeful(trials: Sequence[Trial], rounds_before: int) -> list[int]:
    """The places of those that are not far behind after ``rounds_before`` rounds."""
    within = KEPT_WITHIN[min(rounds_before, len(KEPT_WITHIN)) - 1]
    least_s = min(t.step_s for t in trials)
    return [n for n, t in enumerate(trials) if not t.failed and t.step_s <= within * least_s]


def turn(load: Load, plan: Plan, *, record: bool = False) -> RunReport | str:
    """Some steps of a job from its beginning, or what kept any of the ranks from training them."""
    leave_device()  # the threads of new process groups are to be outside
    expected_s = max(plan.predicted_step_s, 1e-3)
    steps = UNCOUNTED_STEPS + max(LEAST_STEPS, min(MOST_STEPS, round(TURN_S / expected_s)))
    timeout_s = max(LEAST_TIMEOUT_S, min(MOST_TIMEOUT_S, PATIENCE * expected_s))
    failure, report = "", None
    try:
        # no watch: a rank that fails a trial goes on with the next, and has made fewer calls than the others
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
    except MixmeshError as error:  # in a program; and of collectives that another rank never got to
        failure = OUT_OF_MEMORY if isinstance(error.__cause__, torch.OutOfMemoryError) else str(error)
    gc.collect()  # the model, before the next one is made
    empty_cache(default_device())
    give_back()
    failures = [(rank, text) for rank, text in enumerate(everyones(failure)) if text]
    if failures:  # the others have waited for the one that ran out of memory
        rank, text = min(failures, key=lambda f: (f[1] != OUT_OF_MEMORY, f[0]))
        return f"rank {rank}: {text}"
    return report if report.step_s else "the job's data has no batch"


def kind_text(plan: Plan) -> str:
    """The words that tell a plan from other finalists."""
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
    """Whether they are one program in the same micro-steps."""
    if one.micro_batches != two.micro_batches:
        return False
    return print_program(one.program) == print_program(two.program)
