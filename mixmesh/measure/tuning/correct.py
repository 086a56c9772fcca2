"""Corrects a profile by the times that devices took under a plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from ...base.timeline import Timeline
from ...cluster import Cluster
from ...cost import DeviceProfile, Profile, device_key

IDLE = 0.05  # share of a step; a rank that computes for a smaller one does not count
LARGEST = 4.0  # limit on the factor, either way; a larger one has other causes than computing


def device_factors(cluster: Cluster, steps: Iterable[tuple[Timeline, Timeline]]) -> dict[str, float]:
    """The measured seconds of computing in a step over the predicted ones, by ``device_key``. ``steps`` are
    pairs of a predicted and a measured step under one or several plans; their median counts. Among equal
    devices the slowest counts. Devices that did not compute are left out."""
    ratios_of: dict[str, list[float]] = {}
    for predicted, measured in steps:
        of_plan: dict[str, float] = {}
        for device, predicted_s, measured_s in zip(cluster.devices, predicted.compute_s, measured.compute_s):
            if predicted_s > IDLE * predicted.step_s and measured_s > 0:
                key = device_key(device)
                of_plan[key] = max(measured_s / predicted_s, of_plan.get(key, 0.0))
        for key, factor in of_plan.items():
            ratios_of.setdefault(key, []).append(min(max(factor, 1 / LARGEST), LARGEST))
    return {key: statistics.median(each) for key, each in ratios_of.items()}


def corrected(profile: Profile, factors: dict[str, float]) -> Profile:
    """Returns ``profile`` with the computing seconds of every device multiplied by ``factors``."""

    def slower(d: DeviceProfile, factor: float) -> DeviceProfile:
        return replace(
            d,
            step_scale=d.step_scale * factor,
            host_scale=d.host_scale * factor,
            optimizer_s_per_byte=d.optimizer_s_per_byte * factor,
        )

    devices = {key: slower(d, factors.get(key, 1.0)) for key, d in profile.devices.items()}
    texts = [f"{key}: x{factor:.3f}" for key, factor in factors.items()]
    return replace(profile, devices=devices, provenance={**profile.provenance, "corrected": texts})
