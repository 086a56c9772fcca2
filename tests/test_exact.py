"""The search problem as a mixed-integer program: its optimum is that of A*, its bound is below every path."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_graphs import GRAPHS, THREE, bodies, cluster, graph
from test_search import CASES, deep, problem_of

from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.lang.ir import make_ratio
from mixmesh.planner import make_plan
from mixmesh.search.synthesis import Prices, Problem, prove, search

EXACT = 1e-5


def proved(problem: Problem, **options):
    """What HiGHS finds and proves by itself: it knows a poor path only, and no bound."""
    return prove(problem, replace(search(problem, beam=1), bound_s=1e-15), **options)


def agree(problem: Problem) -> None:
    best, found = search(problem), proved(problem)
    assert found.cost_s == pytest.approx(best.cost_s, rel=EXACT)
    assert found.bound_s == pytest.approx(best.cost_s, rel=EXACT) and found.bound_s <= found.cost_s
    near = search(problem, weight=1.2)
    assert found.bound_s <= near.cost_s * (1 + EXACT) and near.cost_s <= 1.2 * found.cost_s * (1 + EXACT)


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", GRAPHS)
def test_equals_the_search(name, case):
    agree(problem_of(GRAPHS[name], case))


# presolve of HiGHS reduces its program to nothing, with a solution that is none
BREAKS_PRESOLVE = """
%x = input("x") : f[8, 4]
%w0 = param("w0") : f[6, 4]
%v0 = aten.linear(%x, %w0) : f[8, 6]
%v1 = aten.softmax.int(%v0, -1) : f[8, 6]
%v2 = aten.add.Tensor(%v1, %v1) : f[8, 6]
%v3 = aten.softmax.int(%v2, -1) : f[8, 6]
%w4 = param("w4") : f[6, 6]
%v4 = aten.linear(%v1, %w4) : f[8, 6]
%v5 = aten.add.Tensor(%v4, %v1) : f[8, 6]
%loss = aten.mean(%v5) : f[]
return %loss"""


@example(BREAKS_PRESOLVE, 2)
@settings(deadline=None, max_examples=25)
@given(bodies(max_steps=6), st.integers(0, len(CASES) - 1))
def test_equals_the_search_on_generated_graphs(body, case):
    agree(problem_of(body, case))


@pytest.mark.parametrize("case", [1, 3])  # the others take minutes
@pytest.mark.parametrize("uneven", [False, True])
def test_equals_the_search_on_folded_blocks(uneven, case):
    problem = problem_of(deep(22, uneven), case)
    assert problem.choices.fold.runs
    agree(problem)


@pytest.fixture(scope="module")
def block():
    """A transformer layer under a language model's head."""
    pytest.importorskip("torch")
    from benchmarks.planning_models import transformer
    from mixmesh.frontend.trace import trace

    job = transformer(1, 24)
    return trace(job.model, job.batch).graph


@pytest.mark.parametrize("price", [0.0, 0.3, 1.0])
def test_equals_the_search_on_a_transformer_block(block, price):
    costs = CostModel(cluster(THREE, 20))
    agree(Problem(block, costs, make_ratio([0.5, 0.25, 0.25]), prices=Prices(gradient_sync=price)))


def test_a_path_that_is_known_is_never_lost(block):
    problem = Problem(block, CostModel(cluster(THREE, 20)), make_ratio([0.5, 0.25, 0.25]))
    known = replace(search(problem, beam=1), bound_s=1e-15)
    found = prove(problem, known, limit_s=0.0)
    assert found.moves == known.moves and known.bound_s <= found.bound_s <= search(problem).cost_s


def test_a_plan_says_how_far_from_the_cheapest_it_may_be():
    body, where = graph(GRAPHS["branches"], 256), cluster(THREE, 100)
    plain = make_plan(body, where, planner="hap")
    exact = make_plan(body, where, planner="hap", exact_s=30.0)
    assert exact.predicted_step_s <= plain.predicted_step_s
    assert exact.gap is not None and exact.gap <= max(EXACT, plain.gap or 0.0) and "exact" in exact.timings_s
    with pytest.raises(InputError, match="seconds"):
        make_plan(body, where, exact_s=0.0)
