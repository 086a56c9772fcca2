"""Constants of a device fitted to some of its measured layers, as a calibration of the card would have them.

Every row of the efficiencies that the layers use has a share of the peak and a factor of the backward pass,
and the device its host's cost of an operator. Layer times are nearly linear in the reciprocal shares, so that
a few Gauss-Newton steps with bounds find the least squares of relative errors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mixmesh.base.least_squares import fit_logs
from mixmesh.cluster import Device
from mixmesh.cluster.classes import ANY, ELEMENTWISE, F32, LOOKUP, PRODUCT, REDUCTION, TF32, THIN
from mixmesh.cluster.device import device_toml
from mixmesh.cost import CostModel
from mixmesh.cost.efficiency import efficiency
from mixmesh.cost.model import GPU_ISSUE_S

from .layer_times import Measured, Row, cluster_of, predict

SEED = 1
STEPS = 6
WITHIN = 4.0  # factor by which a constant may differ from the usual one; no share may be above 1
USUAL_WEIGHT = 0.03  # weight of a constant's distance from the usual one, against relative errors


def chosen(measured: Sequence[Measured]) -> set[Measured]:
    """A third of the measurements, the same ones every time."""
    return set(random.Random(SEED).sample(list(measured), len(measured) // 3))


def fitted_costs(device: str, degree: int, own: Device) -> CostModel:
    """Costs of ``degree`` devices with their own constants."""
    cluster = cluster_of(device, degree)
    machine = replace(cluster.machines[0], devices=(own,) * degree)
    return CostModel(replace(cluster, machines=(machine,)), tf32=True)


def rows_of(device: Device) -> tuple[tuple[str, str], ...]:
    """The rows of efficiencies that the layers use."""
    dtype = TF32 if device.tf32_flop_per_s else F32
    return ((PRODUCT, dtype), (THIN, dtype), (ELEMENTWISE, ANY), (REDUCTION, ANY), (LOOKUP, ANY))


def with_constants(device: Device, logs: np.ndarray) -> Device:
    """The device with constants that are e^log times the usual ones: for each row the seconds of a unit of
    work and the factor of the backward pass, then the host's cost."""
    times = np.exp(logs)
    rows = []
    for n, (name, dtype) in enumerate(rows_of(device)):
        usual = efficiency(name, dtype, device)
        share = usual.share / times[2 * n]
        rows.append((name, dtype, float(share), usual.ramp_s, float(times[2 * n + 1])))
    return replace(device, efficiency=tuple(rows), issue_s=float(GPU_ISSUE_S * times[-1]))


def fit(device: str, measured: Sequence[Measured]) -> Device:
    """The device with the constants that fit best."""
    plain = cluster_of(device, 1).devices[0]
    rows = rows_of(plain)
    high = np.full(2 * len(rows) + 1, np.log(WITHIN))
    low = -high
    low[: 2 * len(rows) : 2] = [np.log(efficiency(*row, plain).share) for row in rows]

    def errors(logs: np.ndarray) -> np.ndarray:
        return predicted(device, with_constants(plain, logs), measured) - 1

    return with_constants(plain, fit_logs(errors, low, high, weight=USUAL_WEIGHT, steps=STEPS))


def predicted(device: str, own: Device, measured: Sequence[Measured]) -> np.ndarray:
    """Predicted over measured times, forward and backward, each as often as its layer stands in the model."""
    costs = {m.degree: fitted_costs(device, m.degree, own) for m in measured}
    out = []
    for m in measured:
        row = predict(m, costs[m.degree])
        weight = np.sqrt(m.count)
        out.append(1 + weight * (row.forward_s / m.forward_s - 1))
        if m.has_backward:
            out.append(1 + weight * (row.backward_s / m.backward_s - 1))
    return np.array(out)


def predict_fitted(
    measured: Sequence[Measured], known: set[Measured]
) -> tuple[tuple[Row, ...], dict[str, Device]]:
    """Predictions for the measurements that are not ``known``, by constants fitted to the known ones; and the
    devices."""
    devices = {
        d: fit(d, [m for m in measured if m in known and m.device == d]) for d in {m.device for m in measured}
    }
    rest = [m for m in measured if m not in known]
    costs = {(m.device, m.degree): fitted_costs(m.device, m.degree, devices[m.device]) for m in rest}
    return tuple(predict(m, costs[m.device, m.degree]) for m in rest), devices


def device_lines(devices: Mapping[str, Device]) -> dict[str, str]:
    """The devices as they stand in a cluster file."""
    return {name: device_toml(device) for name, device in sorted(devices.items())}
