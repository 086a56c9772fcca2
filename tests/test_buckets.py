"""Gradient buckets: every replicated gradient in one, in the order in which gradients become ready."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import GRAPHS, THREE, bodies, cluster, graph

from mixmesh.cost import CostModel
from mixmesh.cost.outline import is_synchronised
from mixmesh.lang.ir import even_ratio, parse_program
from mixmesh.passes.buckets import with_buckets
from mixmesh.search.baselines import data_parallel, fully_sharded

COSTS = CostModel(cluster(THREE))


@settings(deadline=None, max_examples=30)
@given(bodies(), st.sampled_from([1.0, 5e3, 1e5, 1e9]))
def test_buckets(body, capacity):
    program = data_parallel(graph(body, 16), COSTS, even_ratio(3))
    bucketed = with_buckets(program, capacity)
    members = defaultdict(list)
    for i in bucketed.params:
        assert (i.attr("bucket") is not None) == is_synchronised(bucketed, i)
        if is_synchronised(bucketed, i):
            members[i.attr("bucket")].append(i)
    assert sorted(members) == list(range(len(members)))
    for params in members.values():
        size = sum(i.type.value.size_bytes for i in params)
        assert size <= capacity or len(params) == 1
        assert len({i.type.value.dtype for i in params}) == 1
    # a parameter used later has its gradient earlier, and goes in no later bucket
    first_use = {}
    for n, i in enumerate(bucketed.instructions):
        for name in i.inputs:
            first_use.setdefault(name, n)
    order = sorted((i for p in members.values() for i in p), key=lambda i: -first_use[i.result])
    numbers = [i.attr("bucket") for i in order]
    assert numbers == sorted(numbers)
    assert parse_program(str(bucketed)) == bucketed
    assert with_buckets(bucketed, capacity) == bucketed
    assert bucketed.graph == program.graph


def test_stored_shards_have_no_bucket():
    program = with_buckets(fully_sharded(data_parallel(graph(GRAPHS["mlp"], 16), COSTS, even_ratio(3))), 1e6)
    assert all(i.attr("bucket") is None for i in program.params)
