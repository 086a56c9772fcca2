"""Sufficient factors: which weights they fit, when they pay, and that gradients stay those of one device."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import TWO, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio
from mixmesh.measure.verification import verify
from mixmesh.passes.factors import Product, cheapest_cut, cut_factors, factorable, saved_s, with_factors
from mixmesh.planner import make_plan
from mixmesh.search.baselines import data_parallel


class Wide(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)
        self.tied = nn.Linear(64, 64)

    def forward(self, x):
        return self.tied(self.tied(self.down(self.up(x).relu()))).square().mean()


def traced(rows: int, width: int = 512):
    return trace(Wide(width), {"x": torch.randn(rows, 64)})


def program(rows: int):
    graph = traced(rows).graph
    return data_parallel(graph, CostModel(cluster(TWO)), make_ratio([0.6, 0.4]))


def test_a_weight_that_is_used_twice_is_summed():
    assert {"up.weight", "down.weight"} <= set(names(program(16)))
    assert "tied.weight" not in names(program(16))


def names(p) -> list[str]:
    return [p.producers[name].args[0] for name in factorable(p)]


def test_what_is_gathered_is_in_no_bucket():
    p = program(16)
    chosen = frozenset(factorable(p))
    made = with_factors(p, chosen)
    assert chosen <= made.factored
    assert not any("bucket" in dict(i.attrs) for i in made.params if i.result in made.factored)


def test_it_saves_less_the_larger_the_batch():
    costs = CostModel(cluster(TWO, 1))
    saved = []
    for rows in (8, 64, 512, 4096):
        p = program(rows)
        (name,) = (n for n in factorable(p) if p.producers[n].args[0] == "up.weight")
        saved.append(saved_s(p, factorable(p)[name][0], costs))
    assert saved == sorted(saved, reverse=True) and saved[0] > 0 > saved[-1]


@pytest.mark.parametrize("rows", [8, 4096])
def test_the_plan_uses_it_where_it_is_faster(rows):
    slow_links = cluster(TWO, 0.5)
    plan = make_plan(traced(rows), slow_links, planner="hap")
    plain = make_plan(traced(rows), slow_links, planner="ddp-proportional")
    assert plan.predicted_step_s <= plain.predicted_step_s
    if rows == 4096:
        assert not plan.program.factored


def test_it_verifies():
    model, batch = Wide(), {"x": torch.randn(12, 64)}
    graph = trace(model, batch).graph
    p = data_parallel(graph, CostModel(cluster(TWO)), make_ratio([0.6, 0.4]))
    made = with_factors(p, frozenset(factorable(p)))
    report = verify(model, batch, made)
    assert report.ok, report


TENSORS = "abcdef"
seconds = st.integers(-20, 20).map(lambda n: n / 8)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(seconds, st.sets(st.sampled_from(TENSORS), max_size=3)), max_size=8),
    st.lists(st.integers(0, 16).map(lambda n: n / 8), min_size=6, max_size=6),
)
def test_the_cut_is_the_cheapest(found, prices):
    """Against all subsets of the products."""
    products = [Product(str(n), saved, tuple(sorted(needed))) for n, (saved, needed) in enumerate(found)]
    gather_s = dict(zip(TENSORS, prices))

    def cost(chosen) -> float:
        needed = {name for p in chosen for name in p.needed}
        return sum(gather_s[name] for name in needed) - sum(p.saved_s for p in chosen)

    subsets = (s for count in range(len(products) + 1) for s in combinations(products, count))
    cut = cheapest_cut(products, gather_s)
    assert cost([p for p in products if p.weight in cut]) == pytest.approx(min(map(cost, subsets)))


@pytest.mark.parametrize("rows, repeated", [(8, True), (4096, False)])
def test_the_cut_follows_the_batch(rows, repeated):
    p = program(rows)
    costs = CostModel(cluster(TWO, 1))
    assert ("up.weight" in {p.producers[name].args[0] for name in cut_factors(p, costs)}) == repeated
