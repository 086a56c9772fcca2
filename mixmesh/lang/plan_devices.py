"""The devices that a plan was made for, one a rank, as the plan file holds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..cluster import Cluster, Machine


@dataclass(frozen=True)
class PlannedDevice:
    """One rank's device in the cluster that was planned for. ``like`` is the first machine that equals
    ``machine`` in all figures of devices and links: a plan runs as well when the two are swapped."""

    machine: str
    like: str
    device: str
    kind: str
    memory_bytes: int

    def __str__(self) -> str:
        return f'{self.device} ({self.memory_bytes / 2**30:.3g} GiB) of machine "{self.machine}"'


def planned_devices(cluster: Cluster) -> tuple[PlannedDevice, ...]:
    """The devices of ``cluster`` in rank order."""
    first: dict[Machine, str] = {}
    rows = []
    for machine in cluster.machines:
        like = first.setdefault(replace(machine, name=""), machine.name)
        rows += [PlannedDevice(machine.name, like, d.name, d.kind, d.memory_bytes) for d in machine.devices]
    return tuple(rows)


def is_row(value: Any) -> bool:
    """Whether a value of a plan's header is one device."""
    if not isinstance(value, list) or len(value) != len(fields(PlannedDevice)):
        return False
    *texts, memory_bytes = value
    return all(isinstance(text, str) for text in texts) and type(memory_bytes) is int and memory_bytes > 0


def rows_text(devices: Sequence[PlannedDevice]) -> str:
    """A list of rows in TOML."""
    rows = ([d.machine, d.like, d.device, d.kind, d.memory_bytes] for d in devices)
    return "[" + ", ".join(json.dumps(row).replace("\x7f", "\\u007f") for row in rows) + "]"


def devices_of_rows(rows: list[list] | None) -> tuple[PlannedDevice, ...] | None:
    return None if rows is None else tuple(PlannedDevice(*row) for row in rows)
