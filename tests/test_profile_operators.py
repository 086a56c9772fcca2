"""Operators as they are cut: what is measured of a product, kept in a profile, and asked for."""

from __future__ import annotations

import time

import torch
from small_graphs import THREE, cluster, graph

from mixmesh.baselines import data_parallel, tensor_parallel
from mixmesh.cost import CostModel, Curve, DeviceProfile, OpMeasurement, Profile, device_key, op_key
from mixmesh.cost.placed import Sheet
from mixmesh.ir import Shard, make_ratio
from mixmesh.profiler.meter import Meter
from mixmesh.profiler.operators import measure_ops
from mixmesh.rules import call_of

BODY = """\
%x = input("x") : f32[{n}, 64]
%w = param("w") : f32[64, 64]
%b = param("b") : f32[64]
%y = aten.linear(%x, %w, %b) : f32[{n}, 64]
%t = aten.t(%y) : f32[64, {n}]
%s = aten.matmul(%y, %t) : f32[{n}, {n}]
%loss = aten.mean(%s) : f32[]
return %loss"""
CPU = torch.device("cpu")
RATIO = make_ratio([0.5, 0.3, 0.2])


def steady(seconds: float) -> Curve:
    return Curve(((0.1, 0.1 * seconds), (1.0, seconds)))


def test_products_with_a_parameter_are_measured_as_they_are_cut():
    made = graph(BODY.format(n=32), 1)
    node = {n.op: n for n in made.nodes}
    deadline = time.perf_counter() + 60
    found, skipped = measure_ops(made, (0.25, 0.5), Meter(CPU, emulated=False), CPU, deadline, lambda _: None)
    linear = found[op_key(call_of(node["aten.linear"], made.types))]
    # the weight's rows; its columns, with the input's
    assert not skipped and set(linear.cuts) == {"011", "110"}
    assert all([x for x, _ in curve.points] == [0.25, 0.5] for both in linear.cuts.values() for curve in both)
    assert not found[op_key(call_of(node["aten.matmul"], made.types))].cuts  # of two activations


def test_without_time_for_them_there_are_none():
    made = graph(BODY.format(n=32), 1)
    found, skipped = measure_ops(made, (0.5,), Meter(CPU, emulated=False), CPU, 0.0, lambda _: None)
    assert not found and skipped


def test_a_program_costs_what_was_measured_of_its_cuts(tmp_path):
    """A cut weight takes a hundredth of what a cut batch takes; read from the file."""
    where = cluster(THREE)
    made = graph(BODY.format(n=60), 1)
    key = op_key(call_of(next(n for n in made.nodes if n.op == "aten.linear"), made.types))
    whole = {"forward": 1.0, "backward": 2.0}
    cuts = {"011": tuple(steady(s / 100) for s in whole.values())}
    measured = OpMeasurement(*map(steady, whole.values()), 1, 1, cuts)
    profile = Profile({device_key(d): DeviceProfile({key: measured}, 0.0, 0) for d in where.devices}, ())
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    costs = CostModel(where, Profile.load(tmp_path / "p.json"))
    seconds = {}
    for program in (data_parallel(made, costs, RATIO), tensor_parallel(made, costs, RATIO)):
        sheet = Sheet(program, costs)
        n, linear = next((n, i) for n, i in enumerate(program.instructions) if i.op == "aten.linear")
        weight = isinstance(program.types[linear.inputs[1]].placement, Shard)
        forward, backward = sheet.seconds(program)
        seconds[weight] = forward[sheet.work_of[n]][0] + backward[sheet.work_of[n]][0]
    assert 90 < seconds[False] / seconds[True] < 110
