"""The noise of a device whose pace changes between measurements is left out of its operators' curves."""

from __future__ import annotations

import pytest
from small_graphs import MLP, THREE, cluster, graph

from mixmesh.cost import CostModel, Curve, DeviceProfile, OpMeasurement, Profile, device_key, op_key
from mixmesh.cost.curve import NOISE
from mixmesh.cost.model import call_flop
from mixmesh.lang.rules import call_of
from mixmesh.measure.profiler import merge

SHARES = (0.1, 0.2, 0.4, 0.8)


def seconds_of(share: float) -> float:
    return 0.5 + 10.0 * share


def noisy(*factors: float) -> Curve:
    return Curve(tuple((share, seconds_of(share) * f) for share, f in zip(SHARES, factors)))


def test_points_near_the_line_are_on_it():
    curve = noisy(1.3, 0.9, 1.2, 1.0)
    a, b = curve.affine
    assert curve.calmed.points == tuple((share, pytest.approx(a + b * share)) for share in SHARES)
    assert curve.calmed.affine == pytest.approx((a, b))


def test_a_bend_of_more_than_noise_stays():
    curve = noisy(1.0, 1.0, 1.0, 4.0)
    a, b = curve.affine
    calmed = dict(curve.calmed.points)
    assert curve.points[-1][1] > NOISE * (a + b * SHARES[-1])
    assert calmed[SHARES[-1]] == pytest.approx(curve.points[-1][1] / NOISE)


def test_two_points_have_no_noise():
    curve = Curve(((0.1, 3.0), (0.2, 1.0)))
    assert curve.calmed is curve


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_only_a_cpu_is_calmed_and_no_part_of_a_weight(kind):
    made = graph(MLP, 48)
    where = cluster(THREE.replace("issue_us = 8", f'kind = "{kind}"'))
    device = where.devices[0]
    call = next(call_of(i, made.types) for i in made.nodes if i.op == "aten.linear")
    curve = noisy(1.3, 0.9, 1.2, 1.0)
    measured = OpMeasurement(curve, curve, call_flop(call), 1000, {"011": (curve, curve)})
    profile = Profile({device_key(device): DeviceProfile({op_key(call): measured}, 0.0, 0, 2.0)}, ())
    costs = CostModel(where, profile)
    expected = curve.calmed if kind == "cpu" else curve
    time, cut = costs.op(call, 1, 0), costs.op(call, 1, 0, "011")
    for share in SHARES:
        assert time.forward.at(share) == pytest.approx(2.0 * expected.at(share))
        assert time.backward.at(share) == pytest.approx(2.0 * expected.at(share))
        assert cut.forward.at(share) == pytest.approx(2.0 * curve.at(share))


def test_of_two_equal_devices_the_slower_counts():
    """A device whose operators happened to be measured in slow seconds has a small scale of whole steps."""
    fast, slow = (DeviceProfile({}, 0.0, 0, step_scale=scale) for scale in (1.2, 0.9))
    assert merge([(fast, 0.010), (slow, 0.012)]) is slow
    assert merge([(slow, 0.012), (fast, 0.010), (fast, 0.011)]) is fast
