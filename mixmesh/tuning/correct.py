"""A profile that agrees with what the devices took for a plan. No torch."""

from __future__ import annotations

from dataclasses import replace

from ..cluster import Cluster
from ..cost import DeviceProfile, Profile, device_key
from ..timeline import Timeline

LARGEST = 4.0  # either way; beyond it something else happened than computing


def device_factors(cluster: Cluster, predicted: Timeline, measured: Timeline) -> dict[str, float]:
    """By ``device_key``: seconds of computing in a measured step over those predicted; of equal devices
    that which took longest counts. 1 for those that had nothing to do."""
    out: dict[str, float] = {}
    for device, foreseen_s, took_s in zip(cluster.devices, predicted.compute_s, measured.compute_s):
        factor = took_s / foreseen_s if foreseen_s > 0 and took_s > 0 else 1.0
        factor = min(max(factor, 1 / LARGEST), LARGEST)
        key = device_key(device)
        out[key] = max(factor, out.get(key, 0.0))
    return out


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
