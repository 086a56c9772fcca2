"""A row of the list of passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..budget import Budget
from ..proposal import Proposal
from ..task import Task


@dataclass(frozen=True)
class Pass:
    """One row of the list. ``improve`` takes the planning context, a proposal and a budget.
    ``keeps_micro_batches``: the pass also works on a proposal in micro-batches, and keeps their order and
    reductions."""

    name: str
    about: str
    improve: Callable[[Task, Proposal, Budget], Proposal]
    keeps_micro_batches: bool = False

    def __call__(self, task: Task, proposal: Proposal, budget: Budget) -> Proposal:
        """The proposal after this pass. ``task.pass_s`` counts the seconds spent, and the proposal the
        seconds gained."""
        if proposal.micro_batches is not None and not self.keeps_micro_batches:
            return proposal
        started = time.perf_counter()
        improved = self.improve(task, proposal, budget)
        task.pass_s[self.name] = task.pass_s.get(self.name, 0.0) + time.perf_counter() - started
        if improved is proposal:
            return proposal
        gained_s = proposal.timeline.step_s - improved.timeline.step_s
        return replace(improved, gained_s=(*proposal.gained_s, (self.name, gained_s)))
