"""The planning bench: its clusters, its targets, and what a plan says of how it was made."""

from __future__ import annotations

import pytest
from small_graphs import GRAPHS, THREE, cluster, graph

from mixmesh.bench.planning import CASES, Case, mixed_cluster, report, run
from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.plan_file import Plan
from mixmesh.planner import make_plan
from mixmesh.ratios import equal_ranks


def test_clusters_have_four_types_in_equal_parts():
    for devices in sorted({case.devices for case in CASES}):
        where = mixed_cluster(devices)
        classes = equal_ranks(CostModel(where), tuple(range(devices)))
        assert [len(c) for c in classes] == [devices // 4] * 4
    with pytest.raises(InputError, match="four types"):
        mixed_cluster(100)


def test_a_row_says_where_the_time_went():
    (row,) = run([Case("branches", 2, 4, most_s=1e6)])
    steps = row.search_s + row.ratios_s + row.simulate_s + row.polish_s
    assert 0.5 * row.total_s < steps <= row.total_s and row.met
    assert row.states_expanded > 0 and row.predicted_step_s > 0
    made = report([row], "mixmesh bench planning")
    assert made["rows"][0]["met"] is True and made["rows"][0]["size"] == 2


def test_a_plan_keeps_how_it_was_made():
    plan = make_plan(graph(GRAPHS["mlp"], 64), cluster(THREE))
    assert set(plan.timings_s) >= {"search", "simulate"} and sum(plan.timings_s.values()) <= plan.planning_s
    again = Plan.parse(str(plan))
    assert again.timings_s == plan.timings_s and again.gap == plan.gap
    # a plan of an older version has neither
    old = "\n".join(s for s in str(plan).split("\n") if not s.startswith(("timings_s", "gap")))
    assert Plan.parse(old).timings_s == {} and Plan.parse(old).gap is None


def test_equal_devices_get_equal_shares():
    plan = make_plan(graph(GRAPHS["mlp"], 512), mixed_cluster(16), planner="hap")
    ratio = plan.program.ratios[0][1]
    batch = 8 * 512
    for equal in equal_ranks(CostModel(mixed_cluster(16)), tuple(range(16))):
        shares = [ratio[r] for r in equal]
        assert max(shares) - min(shares) < 3 / batch
