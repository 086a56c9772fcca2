"""Describes a plan in one line."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf

from ..base.units import plural, seconds_text
from ..cluster import Cluster, Device
from ..cost.calls import is_computation
from ..lang.ir import Instruction, Program, Shard, batch_size_of
from ..lang.plan_file import Plan

ROUNDING = 1e-6  # tolerance for rounding when speeds are added up
BASELINES = (("single", "the fastest device alone"), ("ddp-even", "DDP"))


def headline(plan: Plan, cluster: Cluster) -> str:
    """Formats a plan's own predictions, and those of the baselines that fit, for people: ``3 devices in 2
    machines: hap, 22 / 7 / 3 samples, 118 ms, 1.4x of DDP``. Several devices are never reported as faster
    than one of them by more than the sum of their speeds allows: a larger factor only means that the
    prediction for the one device is its worst case."""
    devices = f"{plural(cluster.world_size, 'device')} in {plural(len(cluster.machines), 'machine')}"
    samples = samples_per_rank(plan)
    parts = [plan.planner]
    is_dealt_out = plan.micro_batches is not None or sum(samples) == batch_size(plan.program)
    if is_dealt_out and any(samples) and cluster.world_size > 1:
        parts.append(" / ".join(map(str, samples)) + " samples")
    parts.append(seconds_text(plan.predicted_step_s))
    steps_s = {c.planner: c.predicted_step_s for c in plan.candidates if c.feasible}
    fastest = max(cluster.devices, key=lambda device: device.flop_per_s)
    most = {"single": floored(summed_speeds(cluster.devices, (fastest,)))}
    parts += [
        f"{times_text(min(steps_s[name] / plan.predicted_step_s, most.get(name, inf)))} of {words}"
        for name, words in BASELINES
        if name in steps_s and name != plan.planner and cluster.world_size > 1 and plan.predicted_step_s
    ]
    return f"{devices}: {', '.join(parts)}"


def times_text(ratio: float) -> str:
    """Formats a factor for people: ``1.4x``, ``120x``."""
    return f"{ratio:.2g}x" if ratio < 99.5 else f"{ratio:.0f}x"


def floored(ratio: float) -> float:
    """The largest number, at most ``ratio``, that ``times_text`` shows exactly."""
    digits = 1 if ratio < 10 else 0
    return floor(10**digits * ratio + ROUNDING) / 10**digits


def summed_speeds(devices: Sequence[Device], part: Sequence[Device]) -> float:
    """The speed of ``devices`` together relative to ``part`` of them: in products, in products of half
    precision, or in memory, whichever is the most."""

    def speeds(some: Sequence[Device]) -> list[float]:
        rates = [(d.flop_per_s, d.half_flop_per_s, d.memory_bytes_per_s) for d in some]
        return [sum(of_all) for of_all in zip(*rates)]

    return max(of_all / of_part for of_all, of_part in zip(speeds(devices), speeds(part)))


def samples_per_rank(plan: Plan) -> tuple[int, ...]:
    """The samples of a global batch that each rank computes: all of them on every rank that works, if the
    program does not cut samples."""
    program = plan.program
    if plan.micro_batches is not None:
        return tuple(sum(m.sizes) for m in plan.micro_batches)
    cut = _cut_samples(program)
    if cut is None:
        size, working = batch_size(program), program.working_ranks
        return tuple(size if rank in working else 0 for rank in range(program.world_size))
    shapes = [program.local_shape(cut.result, rank) for rank in range(program.world_size)]
    return tuple(shape[0] if shape else 0 for shape in shapes)


def _cut_samples(program: Program) -> Instruction | None:
    """An input whose samples are cut, or a value of the same length where most of these are: ranks may need
    all words of a batch, for columns of a table, and compute the rest on their own samples."""
    inputs = [i for i in program.instructions if i.op == "input" and i.type.placement == Shard(0)]
    if inputs:
        return inputs[0]
    size = batch_size(program)
    single = [i for i in program.instructions if is_computation(i) and len(i.types) == 1]
    long = [i for i in single if i.type.value.shape[:1] == (size,)]
    cut = [i for i in long if i.type.placement == Shard(0)]
    return cut[0] if 2 * len(cut) > len(long) else None


def batch_size(program: Program) -> int:
    """The samples of a global batch; 0 if no input has a dim."""
    return batch_size_of(n.types[0] for n in program.graph.batch_inputs)
