"""A profile that agrees with what the devices took for a plan. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from ...base.timeline import Timeline
from ...cluster import Cluster
from ...cost import DeviceProfile, Profile, device_key

IDLE = 0.05  # share of a step: a rank that computes no longer says nothing about computing
LARGEST = 4.0  # either way; beyond it something else happened than computing


def device_factors(cluster: Cluster, steps: Iterable[tuple[Timeline, Timeline]]) -> dict[str, float]:
    """By ``device_key``: seconds of computing in a measured step over those predicted. ``steps`` are
    predicted and measured, of one or several plans, the median of which counts; of equal devices that which
    took longest. Devices that never computed are left out."""
    ratios_of: dict[str, list[float]] = {}
    for predicted, measured in steps:
        of_plan: dict[str, float] = {}
        for device, foreseen_s, took_s in zip(cluster.devices, predicted.compute_s, measured.compute_s):
            if foreseen_s > IDLE * predicted.step_s and took_s > 0:
                key = device_key(device)
                of_plan[key] = max(took_s / foreseen_s, of_plan.get(key, 0.0))
        for key, factor in of_plan.items():
            ratios_of.setdefault(key, []).append(min(max(factor, 1 / LARGEST), LARGEST))
    return {key: statistics.median(each) for key, each in ratios_of.items()}


def corrected(profile: Profile, factors: dict[str, float]) -> Profile:
    """``profile`` in which every device computes ``factors`` as long as it did."""

    def slower(d: DeviceProfile, factor: float) -> DeviceProfile:
        return replace(
            d,
            step_scale=d.step_scale * factor,
            host_scale=d.host_scale * factor,
            optimizer_s_per_byte=d.optimizer_s_per_byte * factor,
        )

    devices = {key: slower(d, factors.get(key, 1.0)) for key, d in profile.devices.items()}
    said = [f"{key}: x{factor:.3f}" for key, factor in factors.items()]
    return replace(profile, devices=devices, provenance={**profile.provenance, "corrected": said})
