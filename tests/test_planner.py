"""The planner: never slower than what it was shown, fits where a plan exists, says what is wrong."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import GRAPHS, ODD, THREE, bodies, cluster, graph

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import Infeasible, InputError
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import parse_program, support
from mixmesh.lang.plan_file import Plan
from mixmesh.planner import BASELINES, PLANNERS, make_plan, segments, whole_counts
from mixmesh.planner.hap import synthesised
from mixmesh.planner.planners import ROWS
from mixmesh.search.ratios import usable_bytes
from mixmesh.simulator import simulate

SMALL = graph(GRAPHS["mlp"], 64)
ATTENTION = graph(GRAPHS["attention"], 32)


@st.composite
def clusters(draw) -> Cluster:
    """One to three machines of one to three devices, from equal to very unequal."""
    speeds = {f"d{n}": draw(st.floats(0.05, 20)) for n in range(3)}
    machines = []
    for _ in range(draw(st.integers(1, 3))):
        devices = ", ".join(
            f'{{ name = "{name}", tflop_per_s = {speeds[name]:.3f}, memory_gib = 4, '
            f"memory_gbyte_per_s = {100 * speeds[name]:.1f} }}"
            for name in draw(st.lists(st.sampled_from(sorted(speeds)), min_size=1, max_size=3))
        )
        link = draw(st.sampled_from([1, 20, 400]))
        machines.append(f"[[machine]]\ndevices = [{devices}]\nlink_gbit_per_s = {link}")
    network = draw(st.sampled_from([0.5, 10, 200]))
    head = f"[network]\nbandwidth_gbit_per_s = {network}\nlatency_us = 20\n"
    return Cluster.parse('name = "drawn"\n' + head + "\n".join(machines) + "\n")


def test_the_fastest_device_alone_counts_its_optimizer():
    """Or else a plan on one device would be called faster than the fastest device alone."""
    figures = "memory_gib = 8, memory_gbyte_per_s = 300"
    where = Cluster.parse(
        f"[[machine]]\ndevices = [{{ name = 'a', tflop_per_s = 10, optimizer_ps_per_byte = 1e6, {figures} }},"
        f"{{ name = 'b', tflop_per_s = 9, {figures} }}]"
    )
    assert support(make_plan(SMALL, where, planner="single").program.shares) == (1,)


@settings(deadline=None, max_examples=25)
@given(clusters(), st.sampled_from([SMALL, ATTENTION]))
def test_auto_is_never_slower_than_a_candidate(where, model):
    plan = make_plan(model, where)
    asked = {c.planner for c in plan.candidates} - {"hap", "two-level", "pipeline"}
    assert asked == {"ddp-tuned", *BASELINES}
    assert all(plan.predicted_step_s <= c.predicted_step_s for c in plan.candidates if c.feasible)
    # what is promised is what the simulator says of the program that is handed out
    check_program(plan.program)
    timeline = simulate(plan.program, CostModel(where), micro_batches=plan.micro_batches)
    assert timeline.step_s == pytest.approx(plan.predicted_step_s)
    assert timeline.peak_memory_bytes == plan.predicted_peak_memory_bytes
    assert parse_program(str(plan.program)) == plan.program
    assert plan.program.graph.params and plan.graph_fingerprint == model.fingerprint


@settings(deadline=None, max_examples=10)
@given(bodies(max_steps=6), st.sampled_from([8, 64]))
def test_generated_models(body, scale):
    plan = make_plan(graph(body, scale), cluster(THREE))
    assert all(plan.predicted_step_s <= c.predicted_step_s for c in plan.candidates if c.feasible)
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("name", [name for name in ODD if name != "one row"])
def test_odd_models(name):
    plan = make_plan(graph(ODD[name], 8), cluster(THREE))
    check_program(plan.program)
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_alone(planner):
    search_s = 2.0 if any(row.is_open_ended for row in ROWS if row.name == planner) else None
    plan = make_plan(SMALL, cluster(THREE), planner=planner, search_s=search_s)
    assert plan.planner in PLANNERS and plan.planner != "auto"
    assert planner in ("auto", plan.planner) and plan.feasible and plan.planning_s > 0


def test_equal_devices():
    """Nothing to gain from inequality: not slower than DDP, and shares that are as good as even."""
    text = 'name = "equal"\n[[machine]]\ndevices = [{ device = "V100-16GB", count = 4 }]\n'
    plan = make_plan(graph(GRAPHS["mlp"], 512), Cluster.parse(text))
    even = next(c for c in plan.candidates if c.planner == "ddp-even")
    assert plan.predicted_step_s <= even.predicted_step_s
    ratio = plan.program.ratios[0][1]
    assert max(ratio) - min(r for r in ratio if r) < 0.01


FAR_APART = """
name = "far apart"
[network]
bandwidth_gbit_per_s = 2
latency_us = 30
[[machine]]
devices = [{ name = "slow", tflop_per_s = 0.4, memory_gib = 16, memory_gbyte_per_s = 100, count = 4 }]
[[machine]]
devices = [{ name = "slow", tflop_per_s = 0.4, memory_gib = 16, memory_gbyte_per_s = 100, count = 2 }]
"""


def test_data_parallelism_is_tuned():
    """It has what every plan has at the end, so that it is faster than the baselines, and it is still data
    parallelism: parameters are whole, and nothing but gradients travels."""
    where, model = Cluster.parse(FAR_APART), ATTENTION
    plan = make_plan(model, where, planner="ddp-tuned")
    plain = make_plan(model, where, planner="ddp-proportional")
    auto = make_plan(model, where)
    assert plan.planner == "ddp-tuned" and plan.program.levels is not None
    assert auto.predicted_step_s <= plan.predicted_step_s < 0.92 * plain.predicted_step_s
    assert {str(i.type.placement) for i in plan.program.params} == {"R"}
    assert not any(i.is_redistribution for i in plan.program.instructions if i.op != "local_slice")


def test_a_useless_device_is_left_out():
    text = """
name = "useless"
[network]
bandwidth_gbit_per_s = 100
latency_us = 10
[[machine]]
devices = [{ device = "V100-16GB", count = 2 }]
link_gbit_per_s = 1000
[[machine]]
devices = [{ name = "old", tflop_per_s = 0.001, memory_gib = 4, memory_gbyte_per_s = 1 }]
"""
    plan = make_plan(graph(GRAPHS["mlp"], 512), Cluster.parse(text))
    working = support(plan.program.ratios[0][1])
    assert working in ((0, 1), (0,), (1,))
    alone = "rank 2 takes no part: the step is faster without it"
    two = f"ranks {1 - working[0]}, 2 take no part: the step is faster without them"
    assert (alone if len(working) == 2 else two) in plan.warnings
    # it gets the values of the model, in groups, before it is known to need none
    model_bytes = sum(i.type.value.size_bytes for i in plan.program.params)
    held = plan.predicted_peak_memory_bytes[2] - CostModel(Cluster.parse(text)).memory_constant_bytes(2)
    assert held < 2.1 * model_bytes


BIG = """
%x = input("x") : f[8, 4]
%u = param("u") : f[64, 4]
%a = aten.linear(%x, %u) : f[8, 64]
%v = param("v") : f[64, 64]
%b = aten.linear(%a, %v) : f[8, 64]
%w = param("w") : f[64, 64]
%c = aten.linear(%b, %w) : f[8, 64]
%t = param("t") : f[64, 64]
%d = aten.linear(%c, %t) : f[8, 64]
%loss = aten.mean(%d) : f[]
return %loss
"""


def of_memory(*memory_gib: float) -> Cluster:
    devices = ", ".join(
        f'{{ name = "m{m}", tflop_per_s = {20 / m:.3f}, memory_gib = {m}, memory_gbyte_per_s = 300 }}'
        for m in memory_gib
    )
    return Cluster.parse(f'name = "memory"\n[[machine]]\ndevices = [{devices}]\n')


def test_the_small_card_does_not_run_out_of_memory():
    """Weights of 0.75 GiB, with gradients and Adam 3.8 GiB: no device holds them, the two together do."""
    where = of_memory(3.3, 5.2)
    model = graph(BIG, 128)
    with pytest.raises(Infeasible):
        make_plan(model, where, planner="ddp-even")
    plan = make_plan(model, where)
    costs = CostModel(where)
    assert plan.planner == "hap"
    for rank, peak in enumerate(plan.predicted_peak_memory_bytes):
        assert peak <= usable_bytes(costs, rank, 0.05)
    stored = [i for i in plan.program.params if str(i.type.placement).startswith("S")]
    assert stored


def test_infeasible_says_what_is_missing():
    with pytest.raises(Infeasible, match="no plan fits in memory") as caught:
        make_plan(graph(BIG, 128), of_memory(1.6, 1.7))
    text = str(caught.value)
    assert "usable on rank" in text and "largest tensor %" in text and "more memory" in text


@pytest.mark.parametrize("gib", [1.2, 1.6])
def test_a_device_with_as_much_more_memory_as_is_proposed_is_large_enough(gib):
    """Of a larger device a larger part stays free, too."""
    model = graph(BIG, 128)
    with pytest.raises(Infeasible) as caught:
        make_plan(model, of_memory(gib, gib), planner="ddp-even")
    size, unit = re.search(r"at least (\S+) (GiB|MiB) more", caught.value.hint[-1]).groups()
    more_gib = float(size) / (1 if unit == "GiB" else 1024)
    assert make_plan(model, of_memory(gib + more_gib, gib + more_gib), planner="ddp-even").feasible


def test_a_smaller_batch_is_not_proposed_where_the_process_alone_does_not_fit():
    with pytest.raises(Infeasible, match="no plan fits in memory") as caught:
        make_plan(graph(BIG, 128), of_memory(0.9, 0.9))
    assert "too small for the process alone" in caught.value.hint[0]
    assert "more memory" in caught.value.hint[-1]


def test_fewer_samples_than_devices():
    model = graph(GRAPHS["mlp"].replace("f[8,", "f[2,"))
    for planner in ("auto", "ddp-even", "ddp-tuned", "tensor-parallel"):
        assert make_plan(model, cluster(THREE), planner=planner).feasible


def test_unknown_planner():
    with pytest.raises(InputError, match="unknown planner 'hop'") as caught:
        make_plan(SMALL, cluster(THREE), planner="hop")
    assert 'planner="hap"' in str(caught.value)
    with pytest.raises(InputError, match="unknown planner None"):
        make_plan(SMALL, cluster(THREE), planner=None)


def test_same_input_same_plan():
    one, two = (make_plan(ATTENTION, cluster(THREE)) for _ in range(2))
    assert one.program == two.program and one.candidates == two.candidates


def test_a_search_asks_the_slow_planners_too():
    """And can only find what is at least as fast."""
    usual, searched = make_plan(SMALL, cluster(THREE)), make_plan(SMALL, cluster(THREE), search_s=0.3)
    more = {c.planner for c in searched.candidates} - {c.planner for c in usual.candidates}
    assert {"poplar", "segments", "placed"} <= more
    assert searched.predicted_step_s <= usual.predicted_step_s


def test_a_search_synthesises_once(monkeypatch):
    """Segments begin with what hap has found, where it was asked."""
    found = []
    monkeypatch.setattr(segments, "synthesised", lambda task: found.append(task) or synthesised(task))
    steps = {c.planner: c.predicted_step_s for c in make_plan(SMALL, cluster(THREE), search_s=0.3).candidates}
    assert not found and steps["segments"] <= steps["hap"] * (1 + 1e-9)
    make_plan(SMALL, cluster(THREE), planner="segments")
    assert len(found) == 1


def test_progress_and_notes():
    said: list[str] = []
    plan = make_plan(SMALL, cluster(THREE), progress=said.append)
    assert [s for s in said if s.startswith("planning: hap, 3 devices")]
    assert any("local" in note for note in plan.notes.values()) and "local" in str(plan)


def test_operators_without_a_row_are_named():
    model = graph(GRAPHS["mlp"].replace("aten.relu", "aten.special_bessel_j0"))
    plan = make_plan(model, cluster(THREE))
    assert any("no sharding rule for aten.special_bessel_j0" in w for w in plan.warnings)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda s: sum(s) > 0.1), st.integers(8, 500))
def test_whole_counts(shares, total):
    from mixmesh.lang.ir import make_ratio

    ratio = make_ratio(shares)
    counts = whole_counts(ratio, total)
    assert sum(counts) == total
    assert all((c > 0) == (r > 0) for c, r in zip(counts, ratio))
    exact = [total * r for r in ratio]
    assert all(math.floor(x) - len(ratio) <= c <= math.ceil(x) + 1 for c, x in zip(counts, exact))
