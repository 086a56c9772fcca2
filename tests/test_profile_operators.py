"""Operators as they are cut: what is measured of a product, kept in a profile, and asked for."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from small_graphs import THREE, cluster, graph

from mixmesh.cost import (
    CostModel,
    Curve,
    DeviceProfile,
    OpMeasurement,
    Profile,
    affine_curve,
    call_flop,
    device_key,
    moved_bytes,
    op_key,
)
from mixmesh.cost.model import is_product
from mixmesh.cost.placed import Sheet
from mixmesh.lang.ir import Shard, make_ratio, parse_program
from mixmesh.lang.rules import call_of
from mixmesh.measure.profiler import operators
from mixmesh.measure.profiler.meter import Meter
from mixmesh.measure.profiler.operators import by_weight, measure_ops
from mixmesh.search.baselines import data_parallel, tensor_parallel

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
DEVICE = cluster(THREE).devices[0]


def measured_ops(made, shares, deadline):
    meter = Meter(CPU, emulated=False)
    return measure_ops(made, shares, meter, CPU, DEVICE, deadline, lambda _: None)


def steady(seconds: float) -> Curve:
    return Curve(((0.1, 0.1 * seconds), (1.0, seconds)))


def test_products_with_a_parameter_are_measured_as_they_are_cut():
    made = graph(BODY.format(n=32), 1)
    node = {n.op: n for n in made.nodes}
    deadline = time.perf_counter() + 60
    found, skipped = measured_ops(made, (0.25, 0.5), deadline)
    linear = found[op_key(call_of(node["aten.linear"], made.types))]
    # the weight's rows; its columns, with the input's
    assert not skipped and set(linear.cuts) == {"011", "110"}
    assert all([x for x, _ in curve.points] == [0.25, 0.5] for both in linear.cuts.values() for curve in both)
    assert not found[op_key(call_of(node["aten.matmul"], made.types))].cuts  # of two activations


def test_every_product_is_cut_at_the_likely_share_before_any_is_at_others(monkeypatch):
    """Time that ends after the first shares leaves one point of each product."""
    two = """\
%x = input("x") : f32[32, 64]
%w = param("w") : f32[64, 64]
%v = param("v") : f32[48, 64]
%y = aten.linear(%x, %w) : f32[32, 64]
%z = aten.linear(%y, %v) : f32[32, 48]
%loss = aten.mean(%z) : f32[]
return %loss"""
    measured, seen = operators.measure_cuts, []

    def noted(bench, node, call, shares):
        seen.append((call.inputs[1].shape, shares))
        return measured(bench, node, call, shares)

    monkeypatch.setattr(operators, "measure_cuts", noted)
    found, _ = measured_ops(graph(two, 1), (0.25, 0.5, 0.75), time.perf_counter() + 60)
    assert [shares for _, shares in seen] == [(0.5,)] * 2 + [(0.25, 0.75)] * 2
    assert {shape for shape, _ in seen[:2]} == {(64, 64), (48, 64)}
    curves = [c for op in found.values() for both in op.cuts.values() for c in both]
    assert len(curves) == 8 and all([x for x, _ in c.points] == [0.25, 0.5, 0.75] for c in curves)


def test_every_operator_is_measured_at_the_likely_share_before_any_is_at_others(monkeypatch):
    """A slow device may have no time for more, and how much longer a cut product takes is not estimated."""
    timed, seen = operators.measure_curves, []

    def noted(bench, node, call, strategy, shares, **options):
        cut = strategy is not None and strategy != operators.sharded(call)[0]
        seen.append((cut, tuple(shares)))
        return timed(bench, node, call, strategy, shares, **options)

    monkeypatch.setattr(operators, "measure_curves", noted)
    made = graph(BODY.format(n=64), 1)
    found, _ = measured_ops(made, (0.25, 0.5, 0.75), time.perf_counter() + 60)
    kinds = list(dict.fromkeys(seen))
    assert kinds == [
        (False, (0.5,)),
        (True, (0.5,)),
        (False, (0.25, 0.75)),
        (False, (0.03125,)),
        (True, (0.25, 0.75)),
    ]
    assert [kind for n, kind in enumerate(seen) if not n or kind != seen[n - 1]] == kinds
    linear = op_key(call_of(next(n for n in made.nodes if n.op == "aten.linear"), made.types))
    assert [x for x, _ in found[linear].forward.points] == [0.03125, 0.25, 0.5, 0.75]


def test_a_cut_measured_at_one_share_has_the_shape_of_the_usual_curves():
    usual = Curve(((0.1, 2.0), (0.5, 3.0), (1.0, 8.0)))
    cut = Curve(((0.5, 6.0),)), Curve(((0.5, 3.0), (1.0, 4.0)))
    forward, backward = OpMeasurement(usual, usual, 10, 10, {"011": cut}).curves("011")
    assert forward.points == ((0.1, 4.0), (0.5, 6.0), (1.0, 16.0))
    assert backward == cut[1]  # two points have a shape of their own
    free = Curve(((0.1, 0.0), (1.0, 0.0)))
    assert OpMeasurement(usual, free, 10, 10, {"011": cut[:1] * 2}).curves("011")[1] == cut[0]


def test_micro_batches_are_measured_after_all_else_that_operators_need():
    made = graph(BODY.format(n=64), 1)
    found, _ = measured_ops(made, (0.25, 0.5), time.perf_counter() + 60)
    for measured in found.values():
        assert [x for x, _ in measured.forward.points] == [x for x, _ in measured.backward.points]
    shares = {key: [x for x, _ in measured.forward.points] for key, measured in found.items()}
    # a sixteenth of the likely share, which is twice the least: two of 64 rows
    linear = op_key(call_of(next(n for n in made.nodes if n.op == "aten.linear"), made.types))
    assert shares[linear] == [2 / 64, 0.25, 0.5]
    few = graph(BODY.format(n=4), 1)
    found, _ = measured_ops(few, (0.25, 0.5), time.perf_counter() + 60)
    linear = op_key(call_of(next(n for n in few.nodes if n.op == "aten.linear"), few.types))
    assert [x for x, _ in found[linear].forward.points] == [0.25, 0.5]  # no fewer than one row


def test_without_time_for_them_there_are_none():
    made = graph(BODY.format(n=32), 1)
    found, skipped = measured_ops(made, (0.5,), 0.0)
    assert not found and skipped


def test_of_every_class_the_first_is_measured_before_all_others():
    made = graph(BODY.format(n=32), 1)
    slow_memory, slow_products = (
        replace(DEVICE, flop_per_s=flop, memory_bytes_per_s=moved)
        for flop, moved in ((1e15, 1e3), (1e3, 1e15))
    )
    for device in (slow_memory, slow_products):
        order = by_weight(made, device)
        classes = [is_product(call) for _, (_, call) in order]
        assert set(classes[:2]) == {True, False}
        assert len({key for key, _ in order}) == len(order) == 3  # a view costs nothing


def test_what_was_not_measured_is_as_fast_as_what_was():
    """Of a device whose products alone were measured, ten times as slow as declared, all else is too."""
    where = cluster(THREE)
    made = graph(BODY.format(n=6_000_000), 1)  # so much that launching it takes next to nothing
    calls = {n.op: call_of(n, made.types) for n in made.nodes if n.op.startswith("aten.")}
    linear, mean = calls["aten.linear"], calls["aten.mean"]
    plain = CostModel(where)
    work = call_flop(linear), moved_bytes(linear)
    ten = affine_curve(0.0, 10 * plain.op(linear, 0, 0).forward.at(1.0))
    measured = OpMeasurement(ten, ten, *work)
    for scale in (1.0, 3.0):
        profile = DeviceProfile({op_key(linear): measured}, 0.0, 0, step_scale=scale)
        costs = CostModel(where, Profile({device_key(where.devices[0]): profile}, ()))
        ratio = costs.op(mean, 0, 0).forward.at(1.0) / plain.op(mean, 0, 0).forward.at(1.0)
        assert ratio == pytest.approx(10 * scale, rel=0.01)


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


def test_all_rows_of_a_table_are_looked_up(monkeypatch):
    """A few would stay in a cache."""
    text = """program lookup world=1 {
  %w = input("w") : f32[1000, 4] R
  %i = input("i") : i64[5000] R
  %out = aten.embedding(%w, %i) : f32[5000, 4] R
  return %out
}
"""
    seen = []
    original = operators.example
    monkeypatch.setattr(operators, "example", lambda *args: seen.append(original(*args)) or seen[-1])
    device = torch.device("cpu")
    operators.time_op(parse_program(text), Meter(device, emulated=False), device)
    assert seen[1].max() > 900 and seen[1].min() < 100
