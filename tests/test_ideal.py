"""What no plan is faster than: true of all that planners propose, and the best such figure of its kind."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import GOOD, write_job
from small_graphs import GRAPHS, THREE, cluster, graph
from test_auto import graph_of, random_cluster
from torch import nn

from benchmarks.papers import floors
from benchmarks.published import HAP_FIGURE_14
from mixmesh.__main__ import execute
from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Profile
from mixmesh.cost.curve import Curve, affine_curve
from mixmesh.cost.peaks import peak_op_s
from mixmesh.cost.profile import DeviceProfile, OpMeasurement, cut_inputs, device_key, op_key
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Graph, Shard, ValueType
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import Plan
from mixmesh.lang.rules import Call, call_of
from mixmesh.planner import make_plan
from mixmesh.planner.budget import AMPLE
from mixmesh.planner.ideal import bound_s, ideal_s, seconds_by_class
from mixmesh.planner.planners import ROWS
from mixmesh.planner.task import Task
from mixmesh.search.synthesis import Choices

SAME = 1 - 1e-9


def least_s(choices: Choices, ranks: tuple[int, ...] | None = None) -> float:
    """Seconds of some devices, or of all, as the cost model estimates them."""
    class_of = choices.costs.class_of
    seconds = seconds_by_class(choices, at_peaks=False)
    return ideal_s(seconds, class_of, range(len(class_of)) if ranks is None else ranks)


def assert_no_plan_is_faster(model: Graph, costs: CostModel) -> None:
    task = Task(model, costs, ADAM, lambda _: None, replace(AMPLE, search_s=0.2))
    found = 0
    for row in ROWS:
        if row.is_learned:
            continue
        for proposal in row.propose(task):
            assert proposal.timeline.step_s >= SAME * task.ideal_s >= SAME**2 * task.bound_s, row.name
            found += 1
    assert found >= 6 and task.bound_s > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["gpt", "moe", "cnn", "mlp"])
def test_no_plan_is_faster(name, seed):
    assert_no_plan_is_faster(graph_of(name), CostModel(random_cluster(seed)))


def measured(model: Graph, where: Cluster, seed: int) -> Profile:
    """Of all operators but a few, curves of any shape, products cut in other ways too, and devices that
    are ahead of their pace after a rest."""
    draw = random.Random(seed)

    def curve(scale: float) -> Curve:
        seconds = sorted(scale * draw.uniform(0.1, 1) for _ in range(4))
        return Curve(tuple(zip((0.05, 0.2, 0.5, 1.0), seconds)))

    devices = {}
    for device in dict.fromkeys(where.devices):
        ops, slow = {}, 1e12 / device.flop_per_s
        for node in model.nodes:
            if node.is_leaf or node.op == "update" or draw.random() < 0.1:
                continue
            scale = 1e-3 * slow * draw.uniform(0.5, 2)
            call = call_of(node, model.types)
            cuts = {
                cut_inputs([Shard(0)] * len(node.inputs)): (curve(scale), curve(scale)),
                "0" * len(node.inputs): (curve(scale), curve(scale)),
            }
            ops[op_key(call)] = OpMeasurement(curve(scale), curve(2 * scale), 10**6, 10**5, cuts)
        rest = {"rested_s": draw.choice([0.0, 0.004]), "rested_speed": 1.8}
        devices[device_key(device)] = DeviceProfile(ops, 1e-11 * slow, 2**20, 1.2, **rest)
    return Profile(devices, ())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_nor_where_costs_were_measured(name, seed):
    model, where = graph_of(name), random_cluster(seed)
    assert_no_plan_is_faster(model, CostModel(where, measured(model, where, seed)))


def test_the_best_share_counts():
    curve = Curve(((0.1, 0.5), (0.5, 0.6), (1.0, 2.0)))
    assert curve.least_s == pytest.approx(0.6 / 0.5)
    assert affine_curve(0.25, 1.0).least_s == pytest.approx(1.25)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(1e-3, 1), st.floats(0, 5, allow_subnormal=False)), min_size=1, max_size=5),
    st.floats(1e-3, 1),
)
def test_no_share_costs_less(steps, share):
    points, shares, seconds = [], 0.0, 0.0
    for width, rise in steps:
        shares, seconds = shares + width, seconds + rise
        points.append((shares, seconds))
    points = [(s / shares, t) for s, t in points]
    curve = Curve(tuple(points))
    assert curve.at(share) / share >= curve.least_s * SAME


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(1e-4, 1), st.floats(1e-4, 1)), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_it_is_the_optimum_of_two_classes(pairs, first, second):
    """Two classes share operators in the order of how much faster the first is, one of them in parts."""
    ordered = sorted(pairs, key=lambda p: p[0] / p[1])
    best, done, left = np.inf, 0.0, sum(b for _, b in ordered)
    for a, b in ordered:  # in this one both end together, or at its ends
        left -= b
        part = (left / second + b / second - done / first) / (a / first + b / second)
        part = min(max(part, 0.0), 1.0)
        best = min(best, max((done + part * a) / first, (left + (1 - part) * b) / second))
        done += a
    found = bound_s(np.array(pairs), np.array([first, second]))
    assert 0.999 * best <= found <= best / SAME


def test_equal_devices_share_all_of_it():
    text = '[[machine]]\ndevices = ["V100-16GB", "V100-16GB", "V100-16GB"]\nlink_gbit_per_s = 100\n'
    model = graph(GRAPHS["mlp"], 64)
    three, one = (
        CostModel(Cluster.parse('name = "equal"\n' + text.replace(', "V100-16GB"', "", less)))
        for less in (0, 2)
    )
    assert least_s(Choices(model, three)) == pytest.approx(least_s(Choices(model, one)) / 3)
    assert least_s(Choices(model, three), (0,)) == pytest.approx(least_s(Choices(model, one)))
    # of one device it is the step
    assert make_plan(model, one.cluster).predicted_step_s == pytest.approx(least_s(Choices(model, one)))


@pytest.mark.parametrize("times", [1e3, 1e7, 1e12])
def test_a_device_that_is_far_slower_takes_nothing_of_it(times):
    """Figures of a mistaken unit leave the bound that the other devices have, and not one of 0."""
    seconds = np.random.default_rng(0).random((12, 1)) * [[1.0, times]]
    others_s = seconds[:, 0].sum()
    assert (1 - 2 / times) * others_s <= bound_s(seconds, np.array([1, 1])) <= others_s


def test_running_statistics_have_no_backward_pass():
    """On one device, whose step is all computing, the ideal is the step."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

        def forward(self, x):
            return self.layers(x).square().mean()

    one = Cluster.parse('[[machine]]\ndevices = ["T4-16GB"]\n')
    plan = plan_traced(trace(Normalised(), {"x": torch.randn(12, 8)}), one, planner="single")
    assert plan.ideal_s == pytest.approx(plan.predicted_step_s)


def test_repeated_blocks_count_as_often_as_they_are():
    model = graph_of("gpt")
    costs = CostModel(random_cluster(1))
    folded, whole = Choices(model, costs), Choices(model, costs, folded=False)
    assert least_s(folded) == pytest.approx(least_s(whole))


def test_no_bound_is_above_a_published_step():
    """Eight P100 trained BERT-Base; the bound is not what the cost model plans with."""
    (floor,) = floors(())
    assert floor.is_below and floor.published_s == 0.81
    job = make("bert-base:512")
    task = Task(
        trace(job.model, job.batch).graph, CostModel(Cluster.parse(HAP_FIGURE_14.cluster)), ADAM, print
    )
    assert floor.bound_s == pytest.approx(task.bound_s)
    assert 0.5 * floor.published_s < floor.bound_s < 0.8 * task.ideal_s


def test_only_products_count_at_the_peaks():
    """Convolutions over windows by Winograd's algorithm; what is bound by memory not at all."""
    device = Cluster.parse('[[machine]]\ndevices = ["V100-16GB"]\n').devices[0]

    def image(channels: int, size: int, dtype: str = "f32") -> ValueType:
        return ValueType(dtype, (8, channels, size, size))

    kernel = ValueType("f32", (64, 64, 3, 3))
    (node,) = (n for n in graph_of("cnn").nodes if n.op.startswith("aten.conv"))
    conv = replace(
        call_of(node, graph_of("cnn").types), inputs=(image(64, 32), kernel), outputs=(image(64, 32),)
    )
    flop = 2 * 8 * 64 * 64 * 32 * 32 * 9
    assert peak_op_s(conv, 2, device) == pytest.approx(3 * flop / 4 / device.flop_per_s)
    # on tensor cores, which PyTorch lets convolutions use
    large = replace(
        conv, inputs=(image(512, 32), ValueType("f32", (512, 512, 3, 3))), outputs=(image(512, 32),)
    )
    for name, peak in (("A100-40GB", 156e12), ("RTX3090-24GB", 35.6e12)):
        card = Cluster.parse(f'[[machine]]\ndevices = ["{name}"]\n').devices[0]
        assert peak_op_s(large, 2, card) == pytest.approx(3 * 64 * flop / 4 / peak)
    assert peak_op_s(Call("aten.relu", (), (), (image(64, 32),), (image(64, 32),)), 1, device) == 0.0


def test_products_count_at_the_peak_of_tf32_where_the_job_allows_it():
    card = Cluster.parse('[[machine]]\ndevices = ["A100-40GB"]\n').devices[0]
    square = ValueType("f32", (4096, 4096))
    product = Call("aten.mm", (), (), (square, square), (square,))
    for tf32, peak in ((False, 19.5e12), (True, 156e12)):
        assert peak_op_s(product, 2, card, tf32=tf32) == pytest.approx(3 * 2 * 4096**3 / peak)


def test_a_plan_says_it(tmp_path, capsys):
    plan = make_plan(graph(GRAPHS["mlp"], 64), cluster(THREE))
    assert 0 < plan.bound_s <= plan.predicted_step_s
    assert Plan.parse(str(plan)) == plan
    plan.save(tmp_path / "x.plan")
    assert execute(["show", str(tmp_path / "x.plan")]) == 0
    assert "at the peaks of their figures" in capsys.readouterr().out  # nothing was measured
    replace(plan, cost_source="profile").save(tmp_path / "x.plan")
    assert execute(["show", str(tmp_path / "x.plan")]) == 0
    out = capsys.readouterr().out
    assert "no plan can be faster than" in out and "peaks" not in out
    assert not replace(plan, cost_source="profile and roofline").is_bound_measured
    old = "\n".join(line for line in str(plan).split("\n") if not line.startswith("bound_s"))
    assert Plan.parse(old).bound_s is None


def test_the_command_says_it(tmp_path, capsys):
    write_job(tmp_path, GOOD)
    (tmp_path / "c.toml").write_text(THREE.replace("LINK", "10"))
    command = ["plan", str(tmp_path / "job.py"), "--cluster", str(tmp_path / "c.toml"), "--json"]
    assert execute(command) == 0
    shown = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert 0 < shown["bound_s"] <= min(c["predicted_step_s"] for c in shown["candidates"])
