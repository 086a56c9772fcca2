"""The costs of a micro-batch: a rank takes a part of its samples, and the whole of everything else.

In the program of a micro-batch, tensors that are cut between samples have the scope of a micro-batch. So the
cut tells whether the *part* of its samples that a rank takes scales a tensor: it scales activations and the
work on them, but neither stored parameters nor the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..lang.ir import Cut, Program, Samples, Scope, Shard, TensorType, micro_step_program
from ..lang.plan_file import Schedule

# for each rank, the part of its samples; None for a rank without micro-batches, or if there are none
Part = Sequence[float | None] | None


def costed_micro_step(program: Program, samples: Samples) -> Program:
    """The part of ``program`` that runs in every micro-batch; whatever is cut between samples has the scope
    of one."""

    def scoped(name: str | None, t: TensorType) -> TensorType:
        is_cut = name in samples.values and isinstance(t.placement, Shard)
        return replace(t, scope=Scope.MICRO_BATCH) if is_cut else t

    step = micro_step_program(program, samples)
    instructions = tuple(
        replace(i, types=tuple(map(scoped, i.results, i.types)))
        if any(r in samples.values for r in i.results)
        else i
        for i in step.instructions
    )
    return replace(step, instructions=instructions)


@dataclass(frozen=True, slots=True)
class Pass:
    """A run of equal micro-batches. ``part`` is the part of its samples that each rank takes, None for a rank
    that runs none of these micro-batches. ``is_last`` marks the pass after which all sums are made."""

    part: tuple[float | None, ...]
    repeats: int
    is_last: bool


def passes(schedule: Schedule) -> Iterator[Pass]:
    """Yields the micro-batches of a step in order, equal ones together. Ranks with fewer micro-batches run
    theirs first and skip the later ones, except the last, which all run together."""
    totals = [max(sum(sizes), 1) for sizes in schedule.sizes]
    earlier = [len(sizes) - 1 for sizes in schedule.sizes]
    num_passed = 0
    for count in sorted({n for n in earlier if n}):
        part = (
            sizes[0] / total if n >= count else None
            for sizes, total, n in zip(schedule.sizes, totals, earlier)
        )
        yield Pass(tuple(part), count - num_passed, False)
        num_passed = count
    yield Pass(tuple(sizes[-1] / total for sizes, total in zip(schedule.sizes, totals)), 1, True)


def largest_parts(schedule: Schedule) -> tuple[float, ...]:
    """For each rank, the largest part of its samples that it takes in one micro-batch."""
    return tuple(max(sizes) / max(sum(sizes), 1) for sizes in schedule.sizes)


def scaled(shares: tuple[float, ...], cut: Cut, part: Part) -> tuple[float, ...]:
    """``shares`` under a ``cut``, scaled to a micro-batch that takes these parts of the samples."""
    if part is None or cut.scope is Scope.STEP:
        return shares
    return tuple(share * (p or 0.0) for share, p in zip(shares, part))
