"""Final passes that do not change the step: they add what a program must say, and remove redundant parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...lang.ir import Program, without_needless_names
from ...passes.algorithms import with_algorithms
from ...passes.direct import without_needless_directness
from ..budget import Budget
from ..proposal import Proposal
from ..task import Task
from .row import Pass


def spelled(name: str, about: str, rewrite: Callable[[Task, Proposal], Program]) -> Pass:
    """The row for a rewrite that does not change the step of a program."""

    def improve(task: Task, proposal: Proposal, _: Budget) -> Proposal:
        program = rewrite(task, proposal)
        return proposal if program is proposal.program else replace(proposal, program=program)

    return Pass(name, about, improve, keeps_micro_batches=True)


ONE_SHOT = spelled(
    "one-shot",
    "no limit for one-shot all-reduces if no sum is below it",
    lambda task, proposal: without_needless_directness(proposal.program, proposal.simulation.sheet),
)
NAMES = spelled(
    "names",
    "no ratio names on values that all ranks hold whole",
    lambda task, proposal: without_needless_names(proposal.program),
)
ALGORITHMS = spelled(
    "algorithms",
    "the fastest measured algorithm of each collective, where the runtime would take another",
    lambda task, proposal: with_algorithms(proposal.program, task.costs),
)
