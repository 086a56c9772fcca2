"""Selects the plans to try on the cluster itself: the fastest of each kind.

A prediction may be some percent off, and plans of one kind are usually off by as much. So a trial of the
second best of the same kind says little, while the best of another kind may show something that the simulator
does not know.
"""

from __future__ import annotations

from ..passes.buckets import bucketings, numbered
from .proposal import BASELINES, Proposal
from .task import Task

WITHIN = 1.3  # plans slower than the chosen one by this factor are left out, except for the best baseline
BUCKET_BYTES = (1e6, 4e6, 16e6, 64e6, 1e12)


def finalists(task: Task, chosen: Proposal, count: int) -> list[Proposal]:
    """Up to ``count - 1`` proposals besides ``chosen``, the fastest by prediction first. The task must have
    kept its ``kinds``. The best baseline that fits is among them, for comparison."""
    assert task.kinds is not None
    if chosen.micro_batches is None:
        for buckets in bucketings(chosen.program, BUCKET_BYTES, chosen.simulation.step.summed):
            task.judge(chosen.planner, numbered(chosen.program, buckets), chosen.simulation)
    others = sorted((p for kind, p in task.kinds.items() if kind != chosen.kind), key=lambda p: p.key)
    bars = [p for p in others if p.planner in BASELINES][:1]
    bars = [] if chosen.planner in BASELINES else bars
    near = [p for p in others if p.timeline.step_s <= WITHIN * chosen.timeline.step_s and p not in bars]
    picked = near[: count - 1 - len(bars)] + bars
    return sorted(picked, key=lambda p: p.key)
