"""Divides the global batch between devices, and each part into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import InputError
from .common import split_together
from .curves import Tables, is_number, is_whole, tables
from .separate import split_separately
from .stages import STAGES

# samples are counted in float64 internally: far below 2**53
MAX_GLOBAL_BATCH = 2**40


@dataclass(frozen=True)
class Allocation:
    """One entry per device: ``accumulation_steps - 1`` micro-batches of ``micro_batch`` samples, then one of
    ``last_micro_batch``; all three are 0 for a device that takes no part.

    ``step_s``: predicted seconds of the step, including collectives. In ZeRO stages 2 and 3 a participating
    device may have nothing left for the last accumulation step (``last_micro_batch`` 0); it still joins the
    collectives.
    """

    micro_batch: tuple[int, ...]
    accumulation_steps: tuple[int, ...]
    last_micro_batch: tuple[int, ...]
    step_s: float

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples of each device: its part of the global batch."""
        parts = zip(self.micro_batch, self.accumulation_steps, self.last_micro_batch)
        return tuple((steps - 1) * micro + last if steps else 0 for micro, steps, last in parts)


def allocate(
    curves: Sequence[tuple[Sequence[int], Sequence[float]]],
    global_batch: int,
    *,
    stage: int,
    collective_s: float = 0.0,
) -> Allocation:
    """The allocation with the shortest step: the search of Poplar (AAAI'25), made exact.

    ``curves``: for every device the measured micro-batch sizes, ascending, and the seconds of one forward and
    backward pass at each; the largest size is the device's limit. Between sizes the curve is linear, below
    the smallest it falls to the fixed cost of the affine fit, and times that fall with the size are noise and
    averaged (``mixmesh.cost.Curve``). ``global_batch`` is in samples.

    ``stage`` 0 and 1: ``collective_s`` (gradients, and in stage 1 parameters) once per step, every device
    with its own accumulation count (``mixmesh.passes.zero.separate``). ``stage`` 2 and 3: ``collective_s`` in
    every accumulation step, whose number is common to all participating devices
    (``mixmesh.passes.zero.common``).

    The step is the shortest possible, within a few parts in 10^12 (rounding). Accumulation takes any batch,
    whatever the limits. Equally fast choices are ranked by fewer accumulation steps (stages 0 and 1: of each
    device, for its samples), then by more even sizes. Samples that more than one device could take without
    making the step longer are divided in proportion to what each can do in that time, ties to the lower
    index.

    Raises InputError for a bad curve, naming the device, and for a bad stage, batch or time.
    """
    _check_stage(stage, collective_s)
    if not is_whole(global_batch) or not 1 <= global_batch <= MAX_GLOBAL_BATCH:
        raise InputError(
            "the global batch is not a number of samples",
            expected=f"an integer, 1 to {MAX_GLOBAL_BATCH}",
            got=f"global_batch={global_batch!r}",
        )
    global_batch = int(global_batch)
    device_tables = tables(curves, global_batch)
    if stage in (0, 1):
        split = split_separately(device_tables, global_batch)
    else:
        split = split_together(device_tables, global_batch, float(collective_s))
    micro_batches, steps, last = zip(*split)
    allocation = Allocation(micro_batches, steps, last, step_s=0.0)
    return replace(allocation, step_s=_step(device_tables, allocation, stage, float(collective_s)))


def step_seconds(
    curves: Sequence[tuple[Sequence[int], Sequence[float]]],
    allocation: Allocation,
    stage: int,
    collective_s: float = 0.0,
) -> float:
    """Predicted seconds of a step with any allocation (its own ``step_s`` is not read).

    Raises InputError like ``allocate``, and for an allocation that the curves or the stage do not allow.
    """
    _check_stage(stage, collective_s)
    if not isinstance(allocation, Allocation):
        raise InputError("there is no allocation", expected="an Allocation", got=repr(allocation)[:60])
    largest = max((m for m in allocation.micro_batch if is_whole(m)), default=0)
    device_tables = tables(curves, max(int(largest), 1))
    _check_allocation(device_tables, allocation, stage)
    return _step(device_tables, allocation, stage, float(collective_s))


def _step(known: Tables, allocation: Allocation, stage: int, collective_s: float) -> float:
    parts = enumerate(zip(allocation.micro_batch, allocation.accumulation_steps, allocation.last_micro_batch))
    times = [(steps, known.of(i)[m], known.of(i)[last]) for i, (m, steps, last) in parts if steps]
    if stage in (0, 1):
        return float(max((steps - 1) * full + last for steps, full, last in times) + collective_s)
    num_steps = times[0][0]
    slowest = max(full for _, full, _ in times)
    return float((num_steps - 1) * slowest + max(last for *_, last in times) + num_steps * collective_s)


def _check_stage(stage: Any, collective_s: Any) -> None:
    if not is_whole(stage) or stage not in STAGES:
        raise InputError("there is no such ZeRO stage", expected="0, 1, 2 or 3", got=f"stage={stage!r}")
    if not is_number(collective_s) or collective_s < 0:
        raise InputError(
            "the collectives' time is not a time in seconds",
            expected="finite and not negative",
            got=f"collective_s={collective_s!r}",
        )


def _check_part(device: int, part: tuple[int, ...], limit: int, *, least: int) -> None:
    """Raises InputError if a device's micro-batch, steps and last micro-batch do not fit together, or the
    micro-batch is above ``limit``; the last one may be as small as ``least``."""
    micro, steps, last = part
    integers = all(is_whole(x) for x in part)
    idle = integers and micro == steps == last == 0
    if not idle and not (integers and steps >= 1 and least <= last <= micro >= 1):
        raise InputError(
            f"device {device} has no valid part of the batch",
            where=f"allocation, device {device}",
            expected=f"{least} <= last_micro_batch <= micro_batch, or 0 for all of them",
            got=f"micro_batch {micro!r}, accumulation_steps {steps!r}, last_micro_batch {last!r}",
        )
    if micro > limit:
        raise InputError(
            f"device {device} cannot hold its micro-batch",
            where=f"allocation, device {device}",
            expected=f"at most {limit}, the largest size of its curve",
            got=str(micro),
        )


def _check_allocation(known: Tables, allocation: Allocation, stage: int) -> None:
    fields = (allocation.micro_batch, allocation.accumulation_steps, allocation.last_micro_batch)
    if any(len(field) != len(known.kind) for field in fields):
        raise InputError(
            "the allocation is for other devices",
            expected=f"{len(known.kind)} entries, one for every curve",
            got=" ".join(str(len(field)) for field in fields),
        )
    for device, part in enumerate(zip(*fields)):
        _check_part(device, part, len(known.of(device)) - 1, least=1 if stage in (0, 1) else 0)
    counts = sorted({int(steps) for steps in fields[1] if steps})
    if not counts or (stage in (2, 3) and len(counts) > 1):
        raise InputError(
            "the allocation does nothing" if not counts else f"stage {stage} accumulates in step",
            expected="one accumulation count, of all devices that take part",
            got=", ".join(map(str, counts)) or "no samples",
        )
