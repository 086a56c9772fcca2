"""Moves shares by whole samples as long as the simulated step gets shorter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...lang.ir import Program, Ratio, make_ratio, shard_sizes, support
from ..proposal import Proposal
from ..task import Task
from .row import Pass

MAX_POLISH = 64
FAR = 1.05  # steps longer than the best by this factor are not polished: single samples save less than that


def polish(task: Task, proposal: Proposal) -> Proposal:
    """Moves single samples between ranks while that shortens the simulated step. Not done if the proposal is
    far from the best, or has fewer samples than ranks."""
    ranks = support(proposal.program.shares)
    if (
        not 1 < len(ranks) <= task.batch
        or not proposal.feasible
        or proposal.timeline.step_s > FAR * task.best_s
    ):
        return proposal
    simulation = proposal.simulation

    def at(counts) -> Program:
        return proposal.program.with_shares(make_ratio(counts))

    def judge(program: Program) -> Proposal:
        candidate_plan = task.judge(proposal.planner, program, simulation, step="polish")
        return replace(candidate_plan, gap=proposal.gap)

    counts = list(whole_counts(proposal.program.shares, task.batch))
    best = judge(at(counts))
    if proposal.key < best.key:
        best = proposal
    for _ in range(MAX_POLISH):
        with task.timed("polish"):
            moves = [(simulation.step_s(at(m)), m) for m in moves_of(counts, ranks, best.timeline.compute_s)]
        better = None
        for step_s, moved in sorted(moves):
            if best.feasible and step_s >= best.timeline.step_s:
                break
            candidate = judge(at(moved))
            if candidate.key < best.key:
                better = candidate, moved
                break
        if better is None:
            break
        best, counts = better
    return best


def moves_of(counts: Sequence[int], ranks: Sequence[int], compute_s: Sequence[float]) -> Iterator[list[int]]:
    """Yields the counts after moving a sample from one of the slowest ranks to one of the fastest."""
    givers = sorted((r for r in ranks if counts[r] > 1), key=lambda r: -compute_s[r])[:2]
    takers = sorted(ranks, key=lambda r: compute_s[r])[:3]
    for giver in givers:
        for taker in takers:
            if giver != taker:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield moved


def whole_counts(ratio: Ratio, total: int) -> tuple[int, ...]:
    """Whole samples per rank, at least one for every rank that takes part."""
    counts = list(shard_sizes(total, ratio))
    for rank in support(ratio):
        while counts[rank] == 0:
            counts[max(range(len(counts)), key=counts.__getitem__)] -= 1
            counts[rank] += 1
    return tuple(counts)


SHARES = Pass(
    "shares",
    "single samples moved between ranks",
    lambda task, proposal, _: polish(task, proposal),
)
