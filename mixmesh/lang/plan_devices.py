"""The devices that a plan was made for, one per rank, as the plan file holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..cluster import Cluster, Machine


@dataclass(frozen=True)
class PlannedDevice:
    """One rank's device in the cluster of the plan. ``like`` is the first machine with devices and links of
    the same figures as ``machine``: the plan runs equally well with the two machines swapped."""

    machine: str
    like: str
    device: str
    kind: str
    memory_bytes: int

    def __str__(self) -> str:
        return f'{self.device} ({self.memory_bytes / 2**30:.3g} GiB) of machine "{self.machine}"'


def planned_devices(cluster: Cluster) -> tuple[PlannedDevice, ...]:
    """Returns the devices of ``cluster`` in rank order."""
    first: dict[Machine, str] = {}
    rows = []
    for machine in cluster.machines:
        like = first.setdefault(replace(machine, name=""), machine.name)
        rows += [PlannedDevice(machine.name, like, d.name, d.kind, d.memory_bytes) for d in machine.devices]
    return tuple(rows)


def is_row(value: Any) -> bool:
    """Whether a value of a plan's header describes one device."""
    if not isinstance(value, list) or len(value) != len(fields(PlannedDevice)):
        return False
    *texts, memory_bytes = value
    return all(isinstance(text, str) for text in texts) and type(memory_bytes) is int and memory_bytes > 0


def rows_of(devices: Sequence[PlannedDevice]) -> list[list[str | int]]:
    """Returns a row of a plan's header for each device."""
    return [[d.machine, d.like, d.device, d.kind, d.memory_bytes] for d in devices]
