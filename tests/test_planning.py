"""The planning bench: its clusters, its targets, and what a plan says of how it was made."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import GRAPHS, THREE, bodies, cluster, graph

from benchmarks.planning import CASES, Case, mixed_cluster, report, run
from benchmarks.planning_models import transformer
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import Infeasible, InputError
from mixmesh.frontend.trace import Traced, trace
from mixmesh.lang.ir import make_ratio
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import Plan
from mixmesh.passes.buckets import bucketings, numbered
from mixmesh.planner import hap, make_plan
from mixmesh.planner.task import LARGER_BYTES, SMALLER_BYTES, USUAL_BYTES, Task
from mixmesh.search.baselines import data_parallel, device_seconds, fully_sharded
from mixmesh.search.ratios import equal_ranks, optimal_ratio
from mixmesh.search.synthesis import Choices, search
from mixmesh.simulator import Simulation


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
    made = report([row], "python -m benchmarks planning")
    assert made["rows"][0]["met"] is True and made["rows"][0]["size"] == 2


def test_a_plan_keeps_how_it_was_made():
    plan = make_plan(graph(GRAPHS["mlp"], 64), cluster(THREE))
    assert set(plan.timings_s) >= {"search", "simulate"} and sum(plan.timings_s.values()) <= plan.planning_s
    again = Plan.parse(str(plan))
    assert again.timings_s == plan.timings_s and again.gap == plan.gap
    # a plan of an older version has neither
    old = "\n".join(s for s in str(plan).split("\n") if not s.startswith(("timings_s", "gap")))
    assert Plan.parse(old).timings_s == {} and Plan.parse(old).gap is None


LITTLE = 0.995  # the share of the fastest step that a search has to save at least
NEAR = """\
name = "near"
[network]
bandwidth_gbit_per_s = 1
latency_us = 20
[[machine]]
link_gbit_per_s = 2400
devices = [{ device = "A100-40GB", count = 2 }]
[[machine]]
devices = [{ device = "T4-16GB", count = 1 }]
"""


@pytest.fixture(scope="module")
def deep() -> Traced:
    """A model that is too large for a thorough examination of each program."""
    job = transformer(18, 64)
    return trace(job.model, job.batch)


LIMITS = {
    "little is left to gain": (Cluster.parse(NEAR), (hap, "ALMOST"), hap.LOST),
    "half of the least sum is too long": (mixed_cluster(8), (hap.Synthesis, "is_beaten"), lambda *_: False),
}


@pytest.fixture
def planned(monkeypatch, deep):
    """A function that plans, and returns the predicted step and the number of searches."""
    searches: list[int] = []
    monkeypatch.setattr(hap, "search", lambda *given, **named: searches.append(0) or search(*given, **named))

    def plan(where: Cluster, **options) -> tuple[float, int]:
        searches.clear()
        return make_plan(deep, where, **options).predicted_step_s, len(searches)

    return plan


@pytest.mark.parametrize("name", LIMITS)
def test_a_large_model_is_searched_only_where_it_may_gain(monkeypatch, planned, name):
    where, limit, off = LIMITS[name]
    step_s, fewer = planned(where)
    monkeypatch.setattr(*limit, off)
    least_s, every = planned(where)
    assert fewer < every and step_s <= least_s / LITTLE


def test_a_planner_that_is_asked_for_searches_everywhere(monkeypatch, planned):
    where, limit, off = LIMITS["little is left to gain"]
    as_asked = planned(where, planner="hap")
    monkeypatch.setattr(*limit, off)
    assert planned(where, planner="hap") == as_asked


def test_shares_do_not_matter_to_what_moves_no_pieces():
    """Data parallelism with equal and with other shares is prepared for simulation once."""
    task = Task(graph(GRAPHS["mlp"], 64), CostModel(cluster(THREE)), ADAM, lambda _: None)
    even, other = (task.data_parallel(make_ratio(r)) for r in ([1, 1, 1], [3, 2, 1]))
    assert task.simulation(even) is task.simulation(other)
    pieces = [fully_sharded(p) for p in (even, other)]
    assert task.simulation(pieces[0]) is not task.simulation(pieces[1])


def test_equal_devices_get_equal_shares():
    plan = make_plan(graph(GRAPHS["mlp"], 512), mixed_cluster(16), planner="hap")
    ratio = plan.program.ratios[0][1]
    batch = 8 * 512
    for equal in equal_ranks(CostModel(mixed_cluster(16)), tuple(range(16))):
        shares = [ratio[r] for r in equal]
        assert max(shares) - min(shares) < 3 / batch


MLP = graph(GRAPHS["mlp"], 512)


@settings(deadline=None, max_examples=30)
@given(bodies(), st.lists(st.integers(1, 8), min_size=3, max_size=3))
def test_no_buckets_get_below_the_bound(body, shares):
    """The planner leaves out what its bound says is slower than the best."""
    where = cluster(THREE)
    made = graph(body, 64 * sum(shares))  # so that no share is rounded
    program = data_parallel(made, CostModel(where), make_ratio(shares))
    simulation = Simulation(program, CostModel(where))
    floor_s, least_s = simulation.least_s(program)
    assert 0 < floor_s <= least_s
    for buckets in bucketings(program, (*SMALLER_BYTES, USUAL_BYTES, *LARGER_BYTES)):
        step_s = simulation.step_s(program, buckets=buckets)
        assert step_s == simulation.step_s(numbered(program, buckets))
        assert least_s <= step_s * (1 + 1e-5)  # ratios have six digits


def test_ranks_that_share_a_clock_keep_the_same_time_alone():
    where = mixed_cluster(16)
    costs = CostModel(where)
    program = data_parallel(MLP, costs, make_ratio([4 - c + (r == 5) for r, c in enumerate(costs.class_of)]))
    simulation = Simulation(program, costs)
    together, alone = simulation.run(program), simulation.run(program, events=True)
    assert together.step_s == pytest.approx(alone.step_s)
    assert together.compute_s == pytest.approx(alone.compute_s) and len(set(together.compute_s)) == 5


def test_the_seconds_of_a_folded_graph_are_those_of_the_whole():
    layers = [
        line
        for n in range(0, 40, 2)
        for line in (
            f'%w{n} = param("w{n}") : f[4, 4]',
            f"%x{n + 1} = aten.linear(%x{n}, %w{n}) : f[1, 4]",
            f"%x{n + 2} = aten.relu(%x{n + 1}) : f[1, 4]",
        )
    ]
    body = "\n".join(['%x0 = input("x") : f[1, 4]', *layers, "%loss = aten.mean(%x40) : f[]", "return %loss"])
    deep, costs = graph(body, 64), CostModel(cluster(THREE))
    folded, whole = Choices(deep, costs), Choices(deep, costs, folded=False)
    assert len(folded.steps) < len(whole.steps)
    assert device_seconds(deep, costs, 0.3, folded) == pytest.approx(device_seconds(deep, costs, 0.3, whole))


def test_shares_without_memory_rows():
    small = "name = 'small'\n[network]\nbandwidth_gbit_per_s = 10\nlatency_us = 20\n[[machine]]\ndevices = ["
    device = "{{ name = '{}', tflop_per_s = {}, memory_gib = 0.62, memory_gbyte_per_s = 100 }}"
    costs = CostModel(
        Cluster.parse(small + ", ".join(device.format(*d) for d in (("a", 4), ("b", 1))) + "]\n")
    )
    program = data_parallel(graph(GRAPHS["mlp"], 16384), costs, make_ratio([1, 1]))
    with pytest.raises(Infeasible):
        optimal_ratio(program, costs, (0, 1))
    shares = optimal_ratio(program, costs, (0, 1), limited=False)
    assert shares[0] > shares[1] > 0
