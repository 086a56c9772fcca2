"""Machines, devices and links: a cluster, its file, the catalogue of known devices, and finding them."""

from .cluster import Cluster, Device, Machine, presets, with_faster_links

__all__ = ["Cluster", "Device", "Machine", "presets", "with_faster_links"]
