"""The plans to try on the cluster itself, where that is wanted: the fastest of each kind.

A prediction may be some percent off, and it is off alike for plans of a kind. So a trial of the second best
of the same kind says little, and one of the best of another kind may show what the simulator did not know.
"""

from __future__ import annotations

from ..passes.buckets import bucketings, numbered
from .proposal import BASELINES, Proposal
from .task import Task

WITHIN = 1.3  # times the chosen one's predicted step; slower ones are left out, but the best baseline
BUCKET_BYTES = (1e6, 4e6, 16e6, 64e6, 1e12)


def finalists(task: Task, chosen: Proposal, count: int) -> list[Proposal]:
    """Up to ``count - 1`` proposals beside ``chosen``, the fastest by prediction first, for a task
    whose ``kinds`` have been kept. The best baseline that fits is among them: it is the bar."""
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
