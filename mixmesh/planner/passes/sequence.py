"""Cuts operators that tensor parallelism replicates along the sequence, if that is faster."""

from __future__ import annotations

from dataclasses import replace

from ...passes.sequence import sequence_parallel
from ..proposal import Proposal
from ..task import Task
from .row import Pass


def along_the_sequence(task: Task, proposal: Proposal) -> Proposal:
    """The proposal with all-reduces of activations replaced by reduce-scatter and all-gather, and the values
    in between cut; unchanged if that is no faster and fits no better."""
    program = sequence_parallel(proposal.program)
    if program is proposal.program:
        return proposal
    candidate = task.best_buckets(proposal.planner, program)
    return min(proposal, replace(candidate, gap=proposal.gap), key=lambda p: p.key)


SEQUENCE = Pass(
    "sequence",
    "values that tensor parallelism replicates between its products, cut along the sequence",
    lambda task, proposal, _: along_the_sequence(task, proposal),
)
