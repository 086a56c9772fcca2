"""No planner's fault reaches who asked for a plan: what the checker refuses is not offered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import TWO, cluster, graph

from mixmesh.cost import CostModel
from mixmesh.errors import VerificationError
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import REPLICATE, with_attrs
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner import make_plan
from mixmesh.planner.offered import offer
from mixmesh.planner.planners import BY_NAME
from mixmesh.planner.proposal import Proposal
from mixmesh.planner.simple import ddp_even, ddp_proportional
from mixmesh.planner.task import Task

GRAPH = graph("""
    %x = input("x") : f[64, 32]
    %w = param("w") : f[48, 32]
    %h = aten.linear(%x, %w) : f[64, 48]
    %r = aten.relu(%h) : f[64, 48]
    %loss = aten.mean(%r) : f[]
    return %loss
""")


def faulty(proposal: Proposal) -> Proposal:
    """With owners that no ratio names."""
    instructions = tuple(
        with_attrs(i, (("owned", "nobody"), ("stage", 1))) if i.op == "param" else i
        for i in proposal.program.instructions
    )
    return replace(proposal, program=replace(proposal.program, instructions=instructions))


def test_another_plan_is_offered():
    task = Task(GRAPH, CostModel(cluster(TWO)), ADAM, lambda text: None)
    (even,), (proportional,) = list(ddp_even(task))[:1], list(ddp_proportional(task))[:1]
    usual = make_plan(GRAPH, cluster(TWO), planner="ddp-even")

    def plan_of(proposal: Proposal):
        return replace(usual, planner=proposal.planner, program=proposal.program)

    (first,) = offer([even], [proportional], plan_of)
    assert first == plan_of(even)
    (second,) = offer([faulty(even)], [faulty(even), proportional, even], plan_of)
    check_program(second.program)
    assert second.planner == "ddp-proportional" and second.program == proportional.program
    (warning,) = set(second.warnings) - set(usual.warnings)
    assert "a program of the planner ddp-even is not valid" in warning
    with pytest.raises(VerificationError, match="unknown ratio 'nobody'"):
        offer([faulty(even)], [faulty(proportional)], plan_of)


def test_every_plan_is_checked(monkeypatch):
    row = replace(BY_NAME["ddp-even"], propose=lambda task: map(uncut, ddp_even(task)))
    monkeypatch.setitem(BY_NAME, "ddp-even", row)
    with pytest.raises(VerificationError, match="cannot be computed with these placements"):
        make_plan(GRAPH, cluster(TWO), planner="ddp-even")


def uncut(proposal: Proposal) -> Proposal:
    """With a result that is said to be whole, where its inputs are cut."""
    instructions = tuple(
        replace(i, types=(replace(i.type, placement=REPLICATE),)) if i.op == "aten.relu" else i
        for i in proposal.program.instructions
    )
    return replace(proposal, program=replace(proposal.program, instructions=instructions))
