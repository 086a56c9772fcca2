"""Operators that one device has not measured, by what another device measured of them."""

from __future__ import annotations

import pytest
from small_graphs import MLP, THREE, cluster, graph

from mixmesh.cost import CostModel, Curve, DeviceProfile, OpMeasurement, Profile, device_key, op_key
from mixmesh.cost.lending import pace, with_others
from mixmesh.cost.model import call_flop
from mixmesh.lang.rules import Call, call_of


def line(per_share: float, *shares: float) -> Curve:
    return Curve(tuple((share, per_share * share) for share in shares))


def costs_of(lacking: str, cuts: dict[str, float]) -> tuple[CostModel, dict[str, Call]]:
    """Costs with a profile of two kinds of devices, of which the second is three times as slow and lacks the
    operators of this name, and all of these ``cuts``; and calls by their operator's name."""
    made, where = graph(MLP, 48), cluster(THREE)
    calls = {i.op: call_of(i, made.types) for i in made.nodes if not i.is_leaf}
    keys = list(dict.fromkeys(device_key(d) for d in where.devices))
    assert len(keys) == 2
    fast, slow = {}, {}
    for number, (op, call) in enumerate(calls.items(), 1):
        flop = call_flop(call)
        both = [line(r * number, *shares) for r, shares in ((2.0, (0.2, 1.0)), (6.0, (0.1, 0.3)))]
        of_cuts = {cut: (line(r, 0.5), line(r, 0.5)) for cut, r in cuts.items()} if flop else {}
        fast[op_key(call)] = OpMeasurement(both[0], both[0], flop, 1000, of_cuts)
        if op != lacking:
            slow[op_key(call)] = OpMeasurement(both[1], both[1], flop, 1000)
    devices = {keys[0]: DeviceProfile(fast, 0.0, 0), keys[1]: DeviceProfile(slow, 0.0, 0, step_scale=1.5)}
    return CostModel(where, Profile(devices, ())), calls


def test_what_a_device_lacks_is_measured_by_another_at_the_pace_of_what_both_have():
    costs, calls = costs_of("aten.relu", {})
    fast, slow = (costs.op(calls["aten.relu"], 1, device_class) for device_class in (0, 1))
    for share in (0.25, 1.0):
        assert slow.forward.at(share) == pytest.approx(1.5 * 3 * fast.forward.at(share))
        assert slow.backward.at(share) == pytest.approx(1.5 * 3 * fast.backward.at(share))
    assert costs.measured_op(calls["aten.relu"], costs.classes[1]) is None  # a plan's warnings name it


def test_an_operator_measured_at_one_share_has_the_shape_that_another_device_measured():
    made, where = graph(MLP, 48), cluster(THREE)
    call = next(call_of(i, made.types) for i in made.nodes if i.op == "aten.linear")
    bent, single = Curve(((0.4, 5.0), (0.8, 9.0))), Curve(((0.1, 4.0),))
    measured = {
        device_key(d): DeviceProfile({op_key(call): OpMeasurement(c, c, call_flop(call), 1000)}, 0.0, 0)
        for d, c in zip((where.devices[0], where.devices[-1]), (bent, single))
    }
    costs = CostModel(where, Profile(measured, ()))
    slow = costs.op(call, 1, costs.class_of[-1])
    factor = 4.0 / bent.at(0.1)
    for share in (0.1, 0.4, 0.6, 0.8):
        assert slow.forward.at(share) == pytest.approx(factor * bent.at(share))
        assert slow.backward.at(share) == pytest.approx(factor * bent.at(share))


def test_an_operator_that_every_device_measured_at_one_share_takes_as_long_as_others_at_theirs():
    """A product of few rows: the weight takes the time, so the slow device needs no longer for four times as
    many. The line through the origin would say four times as long."""
    made, where = graph(MLP, 48), cluster(THREE)
    call = next(call_of(i, made.types) for i in made.nodes if i.op == "aten.linear")
    measured = {}
    for device, share, seconds, per_share in (
        (where.devices[0], 0.4, 3.0, 2.0),
        (where.devices[-1], 0.1, 9.0, 6.0),
    ):
        own, both = Curve(((share, seconds),)), line(per_share, 0.2, 0.6)
        ops = {
            op_key(call): OpMeasurement(own, own, call_flop(call), 1000),
            "aten.linear(f32[9, 9]; )": OpMeasurement(both, both, 10, 1000),
        }
        measured[device_key(device)] = DeviceProfile(ops, 0.0, 0)
    costs = CostModel(where, Profile(measured, ()))
    slow, fast = (costs.op(call, 1, costs.class_of[rank]) for rank in (-1, 0))
    for share in (0.1, 0.25, 0.4):
        assert slow.forward.at(share) == slow.backward.at(share) == pytest.approx(9.0)
        assert fast.forward.at(share) == fast.backward.at(share) == pytest.approx(3.0)


@pytest.mark.parametrize("share, others, lent_s", [(0.1, 0.4, 6.0), (0.4, 0.1, 12.0)])
def test_what_a_device_has_measured_outweighs_what_others_lend(share, others, lent_s):
    """At the devices' pace more work would take less time: the measured point stays where it is."""
    own, lent = (Curve(((s, t),)) for s, t in ((share, 9.0), (others, lent_s)))
    joined = with_others(OpMeasurement(own, own, 10, 1000), [OpMeasurement(lent, lent, 10, 1000)])
    for curve in (joined.forward, joined.backward):
        assert curve.at(share) == curve.at(others) == pytest.approx(9.0)


def test_cuts_that_a_device_lacks_are_measured_by_another():
    costs, calls = costs_of("", {"011": 40.0})
    linear = calls["aten.linear"]
    fast, slow = (costs.op(linear, 1, device_class, "011").forward.at(0.5) for device_class in (0, 1))
    assert fast == pytest.approx(20.0) and slow == pytest.approx(1.5 * 3 * 20.0)
    usual = costs.op(linear, 1, 1).forward.at(0.3)
    assert costs.op(linear, 1, 1, "110").forward.at(0.3) == pytest.approx(usual)  # measured by none


def test_a_product_that_is_cut_in_a_way_that_nobody_measured_takes_longer_as_others_do():
    """Its shape was measured in data parallelism only, products of other shapes in both ways."""

    def measured(cuts: dict) -> OpMeasurement:
        return OpMeasurement(line(2.0, 0.2, 1.0), line(4.0, 0.2, 1.0), 10, 1000, cuts)

    made = graph(MLP, 48)
    linear = next(call_of(i, made.types) for i in made.nodes if i.op == "aten.linear")
    slower = {"011": (line(3.0, 0.5), line(12.0, 0.5)), "110": (line(1.0, 0.5), line(1.0, 0.5))}
    ops = {op_key(linear): measured({}), "aten.linear(f32[9, 9]; )": measured(slower)}
    where = cluster(THREE)
    costs = CostModel(where, Profile({device_key(d): DeviceProfile(ops, 0.0, 0) for d in where.devices}, ()))
    usual, cut, cheaper = (costs.op(linear, 1, 0, c) for c in ("100", "011", "110"))
    assert cut.forward.at(0.5) == pytest.approx(1.5 * usual.forward.at(0.5))
    assert cut.backward.at(0.5) == pytest.approx(3.0 * usual.backward.at(0.5))
    assert cheaper == usual  # no plan may be faster than its bound, which measurements of the shape give


def test_nothing_in_common_is_no_pace():
    one = {"aten.relu(f32[4]; )": OpMeasurement(line(1.0, 0.1, 0.2), line(1.0, 0.1), 0, 10)}
    apart = {"aten.relu(f32[4]; )": OpMeasurement(line(1.0, 0.5, 0.9), line(1.0, 0.5), 0, 10)}
    assert pace(one, apart, product=False) is None and pace(one, one, product=True) is None
    assert pace(one, one, product=False) == 1.0
    # a single share is compared with the line through those of the other
    single = {"aten.relu(f32[4]; )": OpMeasurement(line(3.0, 0.05), line(3.0, 0.05), 0, 10)}
    assert pace(single, apart, product=False) == pytest.approx(3.0)
    assert pace(apart, single, product=False) == pytest.approx(1 / 3)
