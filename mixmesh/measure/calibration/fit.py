"""Fits a device's constants to measured kernels: for each class the share of the peak (the slope), the ramp
(the constant) and the backward pass, and the host's time to issue a kernel.

Predictions come from the cost model itself, so a fitted constant means what the planner takes it for. Errors
are logarithms of predicted over measured seconds, so that small kernels count as much as large ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...base.least_squares import bounded_least_squares, fit_logs
from ...cluster import Cluster, Device, Machine
from ...cluster.classes import (
    ANY,
    ATTENTION,
    CONVOLUTION,
    DEPTHWISE,
    F32,
    HALF,
    MEMORY_BOUND,
    PRODUCTS,
    TF32,
)
from ...cluster.device_file import Fit
from ...cost import CostModel, call_flop
from ...cost.efficiency import Efficiency, efficiency, peak_flop_per_s
from ...cost.kernels import ATTENTION_BACKWARD, PER_GRADIENT, kernels
from ...cost.model import ADAM_ACCESSES
from .samples import SMALL, Row, Timing

STEPS = 12
# weight of a constant's distance from its start, on a log scale: decides if the samples do not
USUAL_WEIGHT = 0.02
LEAST_SHARE, MOST_SHARE = 1e-3, 2.0  # shares of a peak; one above 1 raises the peak (``with_peaks_above``)
RAMP_S = (1e-8, 2e-3)
BACKWARD = (0.1, 10.0)  # bounds on the factor, relative to the usual one
ISSUE_S = (1e-7, 1e-3)
CPU_RAMP_S = 1e-6  # where the fit begins on a CPU
DIGITS = 4  # significant digits of a fitted constant
OPTIMIZER = "optimizer"
Predictions = Sequence[tuple[float, float]]  # (predicted, measured) seconds
RATES = {F32: "flop_per_s", TF32: "tf32_flop_per_s", HALF: "half_flop_per_s", ANY: "memory_bytes_per_s"}


def fit_device(plain: Device, timings: Sequence[Timing]) -> Device:
    """The device with the constants that fit the timings best; constants without timings stay unchanged."""
    device = replace(plain, sustained=1.0)  # rates under load were measured
    small = [t for t in timings if t.sample.kernels == SMALL]
    device = fit_issue(device, small)
    rows = dict.fromkeys(t.sample.row for t in timings if t.sample.kernels != SMALL)
    # memory-bound classes first, because products move bytes at their rate; TF32 after float32, because the
    # faster one counts
    order = [(name, dtype) for dtype in (ANY, F32, TF32, HALF) for name in (*MEMORY_BOUND, *PRODUCTS)]
    for row in order:
        if row in rows:
            device = fit_row(device, row, [t for t in timings if t.sample.row == row])
    if device.kind == "cpu":  # small kernels on a CPU have a ramp too, which is known only now
        device = fit_issue(device, small)
    return with_peaks_above(device)


def fit_issue(device: Device, timings: Sequence[Timing]) -> Device:
    """The device with the host's time per kernel, forward and backward, fitted to kernels so small that
    nothing else counts."""
    if not timings:
        return device
    issue_s = statistics.median(t.forward_s for t in timings)
    backward_s = issue_s / 2

    def with_logs(logs: np.ndarray) -> Device:
        ahead, back = np.exp(logs)
        return replace(device, issue_s=rounded(issue_s * ahead), backward_issue_s=rounded(backward_s * back))

    low, high = bounds((ISSUE_S, issue_s), (ISSUE_S, backward_s))
    return fitted(with_logs, timings, low, high)


def fit_row(device: Device, row: Row, timings: Sequence[Timing]) -> Device:
    """The device with a row of efficiencies fitted to kernels of its class and dtype."""
    usual_ramp_s = efficiency(*row, device).ramp_s or CPU_RAMP_S
    start = Efficiency(start_share(device, row, timings), usual_ramp_s)

    def with_logs(logs: np.ndarray) -> Device:
        time, ramp, backward = np.exp(logs)
        own = Efficiency(
            rounded(start.share / time), rounded(start.ramp_s * ramp), rounded(start.backward * backward)
        )
        return with_row(device, row, own)

    times = start.share / MOST_SHARE, start.share / LEAST_SHARE
    low, high = bounds((times, 1.0), (RAMP_S, start.ramp_s), (BACKWARD, start.backward))
    return fitted(with_logs, timings, low, high)


def start_share(device: Device, row: Row, timings: Sequence[Timing]) -> float:
    """The share of the peak that the largest kernel reached. This is the arithmetic peak even for kernels
    limited by memory, because from a larger start the errors would not depend on the share."""
    largest = max(timings, key=lambda t: t.forward_s)
    call, (name, dtype) = largest.sample.call, row
    if dtype == ANY:
        whole = with_row(device, row, Efficiency(1.0, 0.0))
        at_peak_s = kernels(call, 0, whole, tf32=False)[0].full_s
    else:
        at_peak_s = call_flop(call) / peak_flop_per_s(name, dtype, device)
    return min(max(at_peak_s / largest.forward_s, LEAST_SHARE), MOST_SHARE)


def bounds(*pairs: tuple[tuple[float, float], float]) -> tuple[np.ndarray, np.ndarray]:
    """Bounds for the fit of some constants: the logarithms of the least and the greatest value over the
    start."""
    low, high = np.array([[math.log(end / start) for end in ends] for ends, start in pairs]).T
    return np.minimum(low, 0.0), np.maximum(high, 0.0)


def fitted(
    with_logs: Callable[[np.ndarray], Device], timings: Sequence[Timing], low: np.ndarray, high: np.ndarray
) -> Device:
    """The device whose predictions are nearest to the timings, with the logarithms of its constants within
    these bounds."""

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log([predicted / measured for predicted, measured in pairs(with_logs(logs), timings)])

    return with_logs(fit_logs(errors, low, high, weight=USUAL_WEIGHT, steps=STEPS))


def with_row(device: Device, row: Row, own: Efficiency) -> Device:
    """The device with one more row. A row for convolutions in TF32 also limits the one in plain float32,
    which the cost model would otherwise prefer on cards whose TF32 is slow (``cost.kernels.fastest``)."""
    rows = {r[:2]: r[2:] for r in device.efficiency}
    rows[row] = own.share, own.ramp_s, own.backward
    name, dtype = row
    if dtype == TF32 and name in (CONVOLUTION, DEPTHWISE):
        peak = device.flop_per_s if name == DEPTHWISE else device.tf32_flop_per_s
        share = min(own.share * peak / device.flop_per_s, efficiency(name, F32, device).share)
        rows[name, F32] = share, own.ramp_s, own.backward
    return replace(device, efficiency=tuple((*key, *figures) for key, figures in rows.items()))


def with_peaks_above(device: Device) -> Device:
    """The device with peaks so high that no class of kernels exceeds them, and shares relative to these: a
    card may run above its datasheet's clock, and the bounds of plans rely on peaks (``cost.peaks``). On a GPU
    some convolutions with windows are faster than their multiply-adds (Winograd): they raise no peak, and
    their share is at most 1."""
    raising = {*PRODUCTS, *MEMORY_BOUND} - ({CONVOLUTION} if device.kind == "gpu" else set())
    for dtype, field in RATES.items():
        rows = [r for r in device.efficiency if (F32 if r[0] == DEPTHWISE else r[1]) == dtype]
        above = max([1.0, *(best_share(r) for r in rows if r[0] in raising)])
        own = {r[:2]: (*r[:2], at_most_1(r[2] / above), *r[3:]) for r in rows}
        device = replace(
            device,
            efficiency=tuple(own.get(r[:2], r) for r in device.efficiency),
            **{field: getattr(device, field) * above},
        )
    return device


def best_share(row: tuple[str, str, float, float, float]) -> float:
    """The larger share of the peak that a row reaches in either pass: products are repeated for two
    gradients."""
    name, _, share, _, backward = row
    if name not in PRODUCTS:
        return share
    each = (ATTENTION_BACKWARD / 2 if name == ATTENTION else PER_GRADIENT[name]) * backward
    return max(share, share / each)


def at_most_1(share: float) -> float:
    return min(rounded(share), 1.0)


def costs_of(device: Device, *, tf32: bool) -> CostModel:
    """Costs of a machine with only this device."""
    machine = Machine("calibrated", (device,), 1e9, 1e-6, 1e9)
    return CostModel(Cluster("calibrated", (machine,), 1e9, 1e-6), tf32=tf32)


def pairs(device: Device, timings: Sequence[Timing]) -> list[tuple[float, float]]:
    """Predicted and measured seconds of every pass that was measured."""
    ahead, back = passes(device, timings)
    return [*ahead, *back]


def passes(
    device: Device, timings: Sequence[Timing]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Predicted and measured seconds, forward and backward."""
    costs = {tf32: costs_of(device, tf32=tf32) for tf32 in (False, True)}
    ahead, back = [], []
    for t in timings:
        time = costs[t.sample.dtype == TF32].op(t.sample.call, t.sample.num_gradients, 0)
        ahead.append((time.forward.at(1.0), t.forward_s))
        if t.backward_s is not None:
            back.append((time.backward.at(1.0), t.backward_s))
    return ahead, back


def relative_errors(predictions: Predictions) -> list[float]:
    """The difference of a predicted and a measured time, relative to the shorter one: half as long counts as
    wrong as twice as long, which is an error of 1."""
    return [max(predicted / measured, measured / predicted) - 1 for predicted, measured in predictions]


def fits_of(device: Device, plain: Device, timings: Sequence[Timing]) -> tuple[Fit, ...]:
    """The errors of a fitted device by class and dtype, together with those of the ``plain`` one."""
    fits = []
    for row in dict.fromkeys(t.sample.row for t in timings):
        own = [t for t in timings if t.sample.row == row]
        directions = zip(("forward", "backward"), passes(device, own), passes(plain, own))
        for direction, predictions, before in directions:
            if predictions:
                fits.append(fit_row_errors(row, direction, predictions, before))
    return tuple(fits)


def fit_row_errors(row: Row, direction: str, predictions: Predictions, before: Predictions) -> Fit:
    """The errors of the predictions for one row, together with those ``before`` the fit."""
    errors, usual = relative_errors(predictions), relative_errors(before)
    return Fit(
        *row,
        direction,
        len(errors),
        rounded(statistics.fmean(errors)),
        rounded(max(errors)),
        rounded(statistics.fmean(usual)),
    )


def fit_optimizer(device: Device, steps: Sequence[tuple[float, float]]) -> tuple[Device, tuple[Fit, ...]]:
    """The device with the slope of measured optimizer steps, given as (bytes of parameters, seconds), and the
    error of the slope alone. The fit also has a constant for each step, and its slope is no faster than
    memory allows Adam to be."""
    if not steps:
        return device, ()
    sizes, seconds = np.array(steps, dtype=float).T
    matrix = np.stack([1 / seconds, sizes / seconds], axis=1)
    least = ADAM_ACCESSES / device.memory_bytes_per_s
    low, high = np.array([0.0, least]), np.array([1.0, 1.0])
    _, slope = bounded_least_squares(matrix, np.ones(len(steps)), low, high)
    own = replace(device, optimizer_s_per_byte=rounded(float(slope)))

    def predictions(one: Device) -> list[tuple[float, float]]:
        costs = costs_of(one, tf32=False)
        return [(costs.optimizer_s(0, size), took_s) for size, took_s in steps]

    return own, (fit_row_errors((OPTIMIZER, ANY), "forward", predictions(own), predictions(device)),)


def rounded(value: float) -> float:
    """A fitted figure, rounded to its significant digits."""
    return float(f"{value:.{DIGITS}g}")
