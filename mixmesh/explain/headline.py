"""Describes a plan in one line."""

from __future__ import annotations

from ..base.units import plural, seconds_text
from ..cluster import Cluster
from ..lang.ir import Shard
from ..lang.plan_file import Plan

BASELINES = (("single", "the fastest device alone"), ("ddp-even", "DDP"))


def headline(plan: Plan, cluster: Cluster) -> str:
    """Formats a plan's own predictions, and those of the baselines that fit, for people:
    ``3 devices in 2 machines: hap, 22 / 7 / 3 samples, 118 ms, 1.4x of DDP``."""
    devices = f"{plural(cluster.world_size, 'device')} in {plural(len(cluster.machines), 'machine')}"
    samples = samples_per_rank(plan)
    parts = [plan.planner]
    if any(samples):
        parts.append(" / ".join(map(str, samples)) + " samples")
    parts.append(seconds_text(plan.predicted_step_s))
    steps_s = {c.planner: c.predicted_step_s for c in plan.candidates if c.feasible}
    parts += [
        f"{steps_s[name] / plan.predicted_step_s:.2g}x of {words}"
        for name, words in BASELINES
        if name in steps_s and name != plan.planner
    ]
    return f"{devices}: {', '.join(parts)}"


def samples_per_rank(plan: Plan) -> tuple[int, ...]:
    """The samples of a global batch that each rank computes; zeros if the program does not cut samples."""
    program = plan.program
    if plan.micro_batches is not None:
        return tuple(sum(m.sizes) for m in plan.micro_batches)
    for i in program.instructions:
        if i.op == "input" and isinstance(i.type.placement, Shard) and i.type.placement.dim == 0:
            shapes = [program.local_shape(i.result, rank) for rank in range(program.world_size)]
            return tuple(shape[0] if shape else 0 for shape in shapes)
    return (0,) * program.world_size
