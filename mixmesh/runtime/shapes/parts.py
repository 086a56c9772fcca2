"""Micro-batches of a batch of another size."""

from __future__ import annotations

from dataclasses import replace

from ...errors import PlanError
from ...lang.ir import Program, samples_of
from ...lang.plan_file import MicroBatch, Plan, accumulates, accumulation
from .carry import CannotCarry


def resized(plan: Plan, program: Program) -> Plan:
    """``plan`` with the program for another shape, and with micro-batches of each rank's new samples: of the
    planned size if each rank takes its own number of them, else in the planned number of equal ones.

    Raises CannotCarry if that number does not divide the samples of a rank.
    """
    if not accumulates(plan.micro_batches):
        return replace(plan, program=program, micro_batches=None)
    try:
        samples = samples_of(program)
        together = samples.meets or bool(samples.stages)
        rows = tuple(
            _in_equal_steps(count, row.steps) if together else _as_large(count, row.micro_batch)
            for count, row in zip(samples.counts, plan.micro_batches)
        )
        smaller = replace(plan, program=program, micro_batches=rows)
        accumulation(smaller)
    except PlanError as error:
        raise CannotCarry(
            f"its micro-batches cannot be cut out of it: {error.message}",
            expected=error.expected,
            got=error.got,
            hint=error.hint,
        ) from None
    return smaller


def _as_large(count: int, micro_batch: int) -> MicroBatch:
    if not count:
        return MicroBatch(0, 0, 0)
    size = min(count, micro_batch)
    if not size:
        raise PlanError(
            "a rank that had no samples is given some",
            expected="samples where the plan has some",
            got=f"{count}",
        )
    steps = -(-count // size)
    return MicroBatch(size, steps, count - size * (steps - 1))


def _in_equal_steps(count: int, steps: int) -> MicroBatch:
    if not count and not steps:
        return MicroBatch(0, 0, 0)
    if not steps or count % steps or not count:
        raise PlanError(
            "the number of micro-batches does not divide the samples of a rank",
            expected=f"a multiple of {steps} samples",
            got=f"{count}",
            hint="a batch of the planned size, or a multiple of the number of micro-batches on every rank",
        )
    return MicroBatch(count // steps, steps, count // steps)
