"""The list of planning passes. Each turns a proposal into a faster form, or returns it unchanged."""

from __future__ import annotations

from ...lang.plan_file import PassResult
from ..proposal import Proposal
from ..task import Task
from .checkpointing import CHECKPOINTING
from .factors import FACTORS
from .flat import FLAT
from .order import ORDER
from .reductions import REDUCTIONS
from .rematerialisation import REMATERIALISATION
from .row import Pass
from .sequence import SEQUENCE
from .shares import SHARES
from .spelling import ALGORITHMS, NAMES, ONE_SHOT
from .weight_gradients import WEIGHT_GRADIENTS

# for a program that a search has just found
REPAIRING = (REMATERIALISATION, FACTORS, SHARES)
# for the plans that may become the fastest
ARRANGING = (SEQUENCE, ORDER, WEIGHT_GRADIENTS, FLAT, ONE_SHOT)
# for the program that is returned, whose step they do not change
SPELLING = (NAMES, ALGORITHMS)
# in the order in which a plan goes through them
PASSES = (*REPAIRING, REDUCTIONS, *ARRANGING, CHECKPOINTING, *SPELLING)

__all__ = [
    "ARRANGING",
    "CHECKPOINTING",
    "FACTORS",
    "ORDER",
    "PASSES",
    "REDUCTIONS",
    "REMATERIALISATION",
    "SEQUENCE",
    "SHARES",
    "SPELLING",
    "Pass",
    "results_of",
]


def results_of(task: Task, proposal: Proposal) -> tuple[PassResult, ...]:
    """The cost and the gain of every pass: seconds of planning over all proposals, and seconds of the step
    of this one."""
    gained_s: dict[str, float] = {}
    for name, step_s in proposal.gained_s:
        gained_s[name] = gained_s.get(name, 0.0) + step_s
    return tuple(
        PassResult(p.name, p.about, task.pass_s.get(p.name, 0.0), gained_s.get(p.name, 0.0)) for p in PASSES
    )
