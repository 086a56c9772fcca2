"""The passes that finish a plan. Each takes a proposal to a faster form of it, or gives it back as it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..lang.plan_file import PassResult
from .apart import apart
from .ordered import ordered
from .synced import flat, synced, without_needless_directness
from .task import Proposal, Task


@dataclass(frozen=True)
class Pass:
    """One row of the list. ``improve`` takes the planning context, a proposal and whether there is little
    time; ``keeps_micro_batches``: it can be applied to a proposal in micro-batches, which keep their order
    and reductions."""

    name: str
    about: str
    improve: Callable[[Task, Proposal, bool], Proposal]
    keeps_micro_batches: bool = False

    def __call__(self, task: Task, proposal: Proposal, *, quick: bool) -> Proposal:
        """The proposal after this pass. Seconds spent are counted in ``task.pass_s``, and seconds gained in
        the proposal."""
        if proposal.micro_batches is not None and not self.keeps_micro_batches:
            return proposal
        started = time.perf_counter()
        improved = self.improve(task, proposal, quick)
        task.pass_s[self.name] = task.pass_s.get(self.name, 0.0) + time.perf_counter() - started
        if improved is proposal:
            return proposal
        gained_s = proposal.timeline.step_s - improved.timeline.step_s
        return replace(improved, gained_s=(*proposal.gained_s, (self.name, gained_s)))


REDUCTIONS = Pass(
    "reductions",
    "gradients all-reduced, or reduced to shard owners, whichever is faster for each bucket",
    lambda task, proposal, quick: synced(task, proposal, quick=quick),
)
FLAT = Pass(
    "flat",
    "all-reduces that are not hierarchical where that is as fast",
    lambda task, proposal, quick: flat(task, proposal),
    keeps_micro_batches=True,
)
ORDER = Pass(
    "order",
    "the order of instructions, small all-reduces packed or apart, and the buckets of gradients",
    lambda task, proposal, quick: ordered(task, proposal, quick=quick),
)
WEIGHT_GRADIENTS = Pass(
    "weight gradients",
    "weight gradients first, last, or overlapped with collectives of the backward pass",
    lambda task, proposal, quick: apart(task, proposal, quick=quick),
)
ONE_SHOT = Pass(
    "one-shot",
    "no mention of one-shot all-reduces where none is small enough",
    lambda task, proposal, quick: without_needless_directness(proposal),
    keeps_micro_batches=True,
)
# in the order in which a plan goes through them
ARRANGING = (ORDER, WEIGHT_GRADIENTS, FLAT, ONE_SHOT)
PASSES = (REDUCTIONS, *ARRANGING)


def results_of(task: Task, proposal: Proposal) -> tuple[PassResult, ...]:
    """The cost and the gain of every pass: seconds of planning over all proposals, and seconds of the step
    of this one."""
    gained_s: dict[str, float] = {}
    for name, step_s in proposal.gained_s:
        gained_s[name] = gained_s.get(name, 0.0) + step_s
    return tuple(
        PassResult(p.name, p.about, task.pass_s.get(p.name, 0.0), gained_s.get(p.name, 0.0)) for p in PASSES
    )
