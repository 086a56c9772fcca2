"""Activation checkpointing as a repair, for plans that do not fit, or fit only in small micro-batches."""

from __future__ import annotations

from collections.abc import Collection

from ...lang.ir import regions, with_regions
from ..proposal import Proposal
from ..task import Task
from .row import Pass


def fewest(task: Task, proposal: Proposal, among: Collection[int] | None = None) -> Proposal:
    """The proposal with as few of its regions as memory allows; only those in ``among`` may be dropped, if
    given.

    The last ones are dropped first. They come first in the backward pass, when all kept activations are still
    held; when it reaches the earlier regions, memory has become free for them.
    """
    program = proposal.program
    members = regions(program)
    others = [number for number in members if among is not None and number not in among]
    numbers = sorted(members.keys() - set(others), key=lambda number: members[number][0])

    def first(count: int) -> Proposal:
        kept = {n: number for number in (*others, *numbers[:count]) for n in members[number]}
        candidate = with_regions(program, kept)
        simulation = task.simulation(candidate, accumulating=proposal.simulation.samples is not None)
        return task.judge(proposal.planner, candidate, simulation, micro_batches=proposal.micro_batches)

    best, low, high = proposal, 0, len(numbers)
    while proposal.feasible and low + 1 < high:
        middle = (low + high) // 2
        candidate = first(middle)
        low, high = (low, middle) if candidate.feasible else (middle, high)
        best = min(best, candidate, key=lambda p: p.key)
    return best


REMATERIALISATION = Pass(
    "rematerialisation",
    "as few rematerialised regions as memory allows",
    lambda task, proposal, _: fewest(task, proposal),
    keeps_micro_batches=True,
)
