"""Operators that were measured over another number of samples."""

from __future__ import annotations

import pytest
from small_graphs import MLP, THREE, cluster, graph

from mixmesh.cost import CostModel, Curve, DeviceProfile, OpMeasurement, Profile, device_key, op_key
from mixmesh.cost.model import call_flop
from mixmesh.cost.resized import Measured, resized
from mixmesh.lang.rules import call_of
from mixmesh.planner import make_plan

LINEAR = "aten.linear(f32[{n}, 8], f32[16, 8]; )"
VIEW = "aten.view(f32[{n}, 4, 8]; [{m}, 8])"


def line(per_share: float) -> Curve:
    return Curve(((0.25, 1 + per_share / 4), (0.5, 1 + per_share / 2)))


def measured(flop: int = 0, cuts=None) -> OpMeasurement:
    return OpMeasurement(line(8.0), line(16.0), flop, 1000, cuts or {})


def test_a_share_of_fewer_samples_is_a_smaller_share_of_those_that_were_measured():
    whole, half = measured(64), resized(measured(64), 0.5)
    for share in (0.1, 0.5, 0.8, 1.0):
        assert half.forward.at(share) == pytest.approx(whole.forward.at(share / 2))
        assert half.backward.at(share) == pytest.approx(whole.backward.at(share / 2))
    assert (half.flop, half.moved_bytes) == (32, 500)


def test_of_a_part_of_a_weight_fewer_samples_take_what_they_take_of_all_of_it():
    cut = (line(4.0), line(8.0))
    half = resized(measured(64, {"011": cut}), 0.5)
    forward, backward = half.curves("011")
    assert forward.at(0.5) == pytest.approx(3.0 * 5.0 / 9.0)
    assert backward.at(0.5) == pytest.approx(5.0 * 9.0 / 17.0)


def test_only_sizes_in_one_proportion_are_alike():
    book = Measured({LINEAR.format(n=64): measured(64 * 256), VIEW.format(n=64, m=256): measured()})
    assert book.find(LINEAR.format(n=64), 64 * 256) == measured(64 * 256)
    assert book.find(LINEAR.format(n=48), 48 * 256).flop == 48 * 256
    assert book.find(VIEW.format(n=16, m=64), 0) is not None
    assert book.find(VIEW.format(n=16, m=32), 0) is None
    assert book.find("aten.linear(f32[64, 32], f32[16, 32]; )", 64 * 1024).flop == 64 * 1024
    # four times as large in both dims is sixteen times the work: no size of a batch
    assert book.find("aten.linear(f32[64, 32], f32[64, 32]; )", 64 * 4096) is None
    assert book.find("aten.linear(f64[64, 8], f32[16, 8]; )", 64 * 256) is None
    assert book.find("aten.relu(f32[64, 8]; )", 0) is None


def test_the_nearest_size_counts():
    near, far = measured(32 * 256), OpMeasurement(line(80.0), line(80.0), 4 * 256, 1)
    book = Measured({LINEAR.format(n=4): far, LINEAR.format(n=32): near})
    assert book.find(LINEAR.format(n=24), 24 * 256) == resized(near, 0.75)


def profile_of(text: str, per_share: float) -> Profile:
    """Of the operators of a graph, each of which takes as long."""
    made, where = graph(text, 48), cluster(THREE)
    ops = {}
    for i in made.nodes:
        if not i.is_leaf:
            call = call_of(i, made.types)
            ops[op_key(call)] = OpMeasurement(line(per_share), line(per_share), call_flop(call), 1000)
    devices = {device_key(d): DeviceProfile(ops, 0.0, 0) for d in where.devices}
    return Profile(devices, ())


def test_machines_with_samples_of_their_own_are_planned_by_what_was_measured():
    profile = profile_of(MLP, 8.0)
    where = cluster(THREE)
    plan = make_plan(graph(MLP, 48), where, planner="two-level", profile=profile)
    sizes = {i.types[0].value.shape[0] for i in plan.program.instructions if i.op == "aten.relu"}
    assert len(sizes) == 2 and sum(sizes) == 48 * 8  # of two machines
    costs = CostModel(where, profile)
    for i in plan.program.instructions:
        if i.op in ("aten.linear", "aten.relu"):
            assert costs.measured_op(call_of(i, plan.program.types), where.devices[0]) is not None
