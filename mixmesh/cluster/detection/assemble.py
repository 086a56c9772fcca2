"""Assembles a cluster from the devices found and the rates measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

from ...base.units import GBIT, GIB, ONE, si, si_bytes
from ..cluster import Cluster, Device, Machine
from ..device import calibrated_device
from .inventory import FoundDevice, Inventory
from .links import Link, Links
from .speed import Speed

SAME_SPEED = 0.12  # relative: equal devices differ by as much from one measurement to the next
SIGNIFICANT = 3  # significant digits of a measured figure
ALONE = Link(12.5e9, 10e-6)  # for a machine of one device, which does not use its inner link


def calibrations_of(inventory: Inventory) -> dict[str, Device]:
    """The calibrated cards of the inventory, by name, according to the device files of this machine. Raises
    ClusterError for an invalid file."""
    names = dict.fromkeys(base_name(found) for found in inventory.devices if found.kind == "gpu")
    return {name: device for name in names if (device := calibrated_device(name)) is not None}


def assemble(
    inventory: Inventory,
    speeds: tuple[Speed | None, ...],
    links: Links,
    calibrations: Mapping[str, Device] = MappingProxyType({}),
) -> Cluster:
    """The cluster. Devices with one name are of one type and have the same figures: measured devices with
    similar speeds get those of the slowest. Cards with ``calibrations`` have those."""
    machines = []
    devices = typed_devices(inventory, speeds, calibrations)
    nics = nic_rates(links, len(inventory.machines))
    for index, ranks in enumerate(inventory.machines):
        link = links.inside.get(index, ALONE)
        machines.append(
            Machine(
                name=inventory.devices[ranks[0]].host,
                devices=tuple(devices[rank] for rank in ranks),
                link_bytes_per_s=rounded(link.bytes_per_s, GBIT),
                link_latency_s=rounded(link.latency_s),
                nic_bytes_per_s=rounded(nics.get(index, link.bytes_per_s), GBIT),
            )
        )
    between = links.between.values() or links.inside.values() or (ALONE,)
    latencies_s = sorted(link.latency_s for link in between)
    return Cluster(
        name="detected",
        machines=tuple(machines),
        bandwidth_bytes_per_s=rounded(max(link.bytes_per_s for link in between), GBIT),
        latency_s=rounded(latencies_s[len(latencies_s) // 2]),
    )


def nic_rates(links: Links, num_machines: int) -> dict[int, float]:
    """The bytes per second that each machine reaches with its best partner, by machine."""
    rates: dict[int, float] = {}
    for (a, b), link in links.between.items():
        for machine in (a, b):
            rates[machine] = max(rates.get(machine, 0.0), link.bytes_per_s)
    return rates


def typed_devices(
    inventory: Inventory, speeds: tuple[Speed | None, ...], calibrations: Mapping[str, Device]
) -> list[Device]:
    """The devices in rank order, equal ones under one name."""
    kinds: list[list[int]] = []  # the ranks of each type, the fastest type first
    fastest_first = sorted(range(len(speeds)), key=lambda rank: -speed_of(inventory, speeds, rank))
    for rank in fastest_first:
        same = (ranks for ranks in kinds if are_equal(inventory, speeds, ranks[0], rank))
        match = next(same, None)
        if match is None:
            kinds.append([rank])
        else:
            match.append(rank)
    devices: dict[int, Device] = {}
    names: set[str] = set()
    for ranks in kinds:
        base = base_name(inventory.devices[ranks[0]])
        name = next(n for n in (base, *(f"{base}-{i}" for i in range(2, 10_000))) if n not in names)
        names.add(name)
        own = calibrations.get(base)
        if own is not None:
            memory_bytes = si_bytes(memory_gib(inventory, ranks[0]))
            device = replace(own, name=name, memory_bytes=memory_bytes)
        else:
            device = merged_device(name, inventory, speeds, ranks)
        devices.update(dict.fromkeys(ranks, device))
    return [devices[rank] for rank in range(len(speeds))]


def speed_of(inventory: Inventory, speeds: tuple[Speed | None, ...], rank: int) -> float:
    row = inventory.devices[rank].row
    if row is not None:
        return row.tflop_per_s * 1e12
    speed = speeds[rank]
    assert speed is not None  # a device without a row is measured
    return speed.flop_per_s


def are_equal(inventory: Inventory, speeds: tuple[Speed | None, ...], one: int, other: int) -> bool:
    """Whether two ranks have devices of one type."""
    a, b = inventory.devices[one], inventory.devices[other]
    if (a.kind, a.name, memory_gib(inventory, one)) != (b.kind, b.name, memory_gib(inventory, other)):
        return False
    fast, slow = speed_of(inventory, speeds, one), speed_of(inventory, speeds, other)
    return abs(fast - slow) <= SAME_SPEED * fast


def base_name(found: FoundDevice) -> str:
    if found.row is not None:
        return found.row.name
    return "cpu" if found.kind == "cpu" else found.name


def merged_device(
    name: str, inventory: Inventory, speeds: tuple[Speed | None, ...], ranks: list[int]
) -> Device:
    """The common type of the devices of ``ranks``, which has the speed of the slowest of them."""
    first_device = inventory.devices[ranks[0]]
    memory_bytes = si_bytes(memory_gib(inventory, ranks[0]))
    if first_device.row is not None:
        row = first_device.row
        return Device(
            name,
            row.tflop_per_s * 1e12,
            memory_bytes,
            row.memory_gbyte_per_s * 1e9,
            half_flop_per_s=row.half_tflop_per_s * 1e12,
            supports_bf16=row.supports_bf16,
            tf32_flop_per_s=row.tf32_tflop_per_s * 1e12,
            sustained=row.sustained,
        )
    measured = [speed for rank in ranks if (speed := speeds[rank]) is not None]
    return Device(
        name,
        rounded(min(s.flop_per_s for s in measured)),
        memory_bytes,
        rounded(min(s.memory_bytes_per_s for s in measured)),
        kind=first_device.kind,
        half_flop_per_s=rounded(min(s.half_flop_per_s for s in measured)),
        supports_bf16=first_device.supports_bf16,
    )


def memory_gib(inventory: Inventory, rank: int) -> float:
    """A rank's memory, rounded down to a tenth of a GiB, so that cards that differ by a page count as
    equal."""
    return max(inventory.memory_bytes(rank) * 10 // GIB, 1) / 10


def rounded(value: float, unit: Fraction = ONE) -> float:
    """A measured figure, rounded to its significant digits in the unit of the cluster file."""
    return si(float(f"{value / float(unit):.{SIGNIFICANT}g}"), unit)
