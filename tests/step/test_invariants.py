"""Invariants of a step's events, over graphs held in many ways."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import GRAPHS, THREE, bodies, cluster, graph

from mixmesh.cost import CostModel
from mixmesh.cost.outline import Outline
from mixmesh.lang.ir import Program, make_ratio, parse_program, separable, with_wgrads
from mixmesh.lang.rules import RULES, shard_units
from mixmesh.passes.factors import factorable, with_factors
from mixmesh.passes.recomputation import recomputed
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.simulator.simulation import Simulation
from mixmesh.step import Await, Compute, Start, step_of
from mixmesh.step.events import BACKWARD, FORWARD, LOCAL, REPEATED, WEIGHT, Pass

SHARES = [(1, 1, 1), (3, 2, 1), (1, 0, 1)]
WAYS = ("copies", "shards", "weights apart", "factors", "second runs")


@cache
def costs() -> CostModel:
    return CostModel(cluster(THREE))


def hold(body: str, way: str, ratio) -> Program:
    """The program of a graph, held in one of ``WAYS``."""
    made = graph(body, 4)
    program = data_parallel(made, costs(), ratio, shard_units(made, RULES))
    match way:
        case "shards":
            return fully_sharded(program)
        case "weights apart":
            marks = itertools.cycle(["first", "last", "beside"])
            return with_wgrads(program, dict(zip(separable(program), marks)))
        case "factors":
            return with_factors(program, factorable(program))
        case "second runs":
            return recomputed(program) or program
    return program


def check_pass(order: Pass) -> None:
    events = order.script.events
    started = [e.value for e in events if isinstance(e, Start) and e.value]
    awaited = [e.name for e in events if isinstance(e, Await)]
    assert Counter(started) == Counter(awaited)  # what is not taken in at the end is awaited once
    assert all(a < b for a, b in order.script.edges)  # so the events are a graph without cycles, in order
    numbers = {e.number for e in events if isinstance(e, Start)}
    assert numbers - {LOCAL} == {*range(len(order.exchanges))}
    assert all(len(exchange.ranks) > 1 for exchange, _ in order.exchanges)
    assert sum(len(s.computes) for s in order.script.segments) == sum(isinstance(e, Compute) for e in events)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(GRAPHS.values())) | bodies(), st.sampled_from(SHARES))
def test_every_event_has_its_place(way, body, shares):
    program = hold(body, way, make_ratio(shares))
    outline = Outline(program)
    step = step_of(outline)
    check_pass(step.forward)
    check_pass(step.backward)
    computed = {part: [] for part in (FORWARD, BACKWARD, REPEATED, WEIGHT)}
    for e in (*step.forward.script.events, *step.backward.script.events):
        if isinstance(e, Compute):
            computed[e.part].append(e.at)
    works = [n for n, kind in enumerate(outline.kinds) if kind is not None]
    assert computed[FORWARD] == works  # each computation once, in the program's order
    assert computed[BACKWARD] == [n for n in reversed(works) if outline.flows[n]]
    assert sorted(computed[WEIGHT]) == sorted(program.wgrads)
    assert len({*computed[REPEATED]}) == len(computed[REPEATED])
    sums = step.reductions(program, program.buckets)
    issued = Counter(n for parts in sums.issues.values() for n, ranks in parts for _ in ranks)
    assert issued == {n: len(exchange.ranks) for n, exchange in enumerate(sums.exchanges)}
    assert step_of(Outline(program)) == step  # a function of the program


ADDED_BY_ONE = """
program added world=3 {
  ratio r0 = [RATIO]
  %x = input("x") : f32[96, 512] R@r0
  %w = param("w") : f32[512, 512] S(1)@r0
  %b = param("b") : f32[512] R@r0
  %x.s = local_slice(%x) : f32[96, 512] S(1)@r0
  %b.p = as_partial(%b) : f32[512] P(sum)@r0
  %a = aten.linear(%x.s, %w, %b.p) : f32[96, 512] P(sum)@r0
  %h = reduce_scatter(%a) : f32[96, 512] S(0)@r0
  %v = param("v") : f32[64, 512] R@r0
  %y = aten.linear(%h, %v) : f32[96, 64] S(0)@r0
  %loss = aten.mean(%y) : f32[] P(sum)@r0
  return %loss
}
"""


def test_a_step_on_other_ranks_is_that_of_their_program():
    """Only the rank that adds a bias has a gradient of it."""
    some, every = (parse_program(ADDED_BY_ONE.replace("RATIO", s)) for s in ("0, 0.5, 0.5", "0.4, 0.3, 0.3"))
    reused = Simulation(some, costs()).on(every)
    new = Simulation(every, costs())
    assert [ranks for _, ranks in new.step.ready.points["b"]] == [(0,)]
    assert reused.step.ready == new.step.ready
    assert reused.step_s(every) == new.step_s(every)
