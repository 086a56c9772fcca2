"""Machines, devices and links: a cluster, its file, the catalogue of known devices, and finding them."""

from .cluster import (
    Cluster,
    Device,
    DeviceLink,
    Machine,
    presets,
    with_faster_inside,
    with_faster_links,
    without_device,
)

__all__ = [
    "Cluster", "Device", "DeviceLink", "Machine", "presets", "with_faster_inside", "with_faster_links",
    "without_device",
]  # fmt: skip
