"""Checks that the ranks are on the devices that were planned for. With machines started in another order than
in the cluster file, or with other cards, training is right but slow, or runs out of memory.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..base.units import size_text
from ..cluster.catalogue import CATALOGUE, catalogue_row
from ..errors import PlanError
from ..lang.plan_devices import PlannedDevice
from .accelerator import card_facts, is_accelerator

# share of a card's nominal memory that driver and ECC keep, as the catalogue's own comparison allows
MEMORY_TOLERANCE = 0.12


@dataclass(frozen=True)
class FoundDevice:
    """A rank's device as PyTorch reports it, and its host. ``name`` is the driver's."""

    host: str
    kind: str
    name: str
    memory_bytes: int

    def __str__(self) -> str:
        size = f" with {size_text(self.memory_bytes)}" if self.kind == "gpu" else ""
        return f'{self.name}{size} on host "{self.host}"'


def find_device(device: torch.device) -> FoundDevice:
    """This process's device."""
    host = socket.gethostname()
    if not is_accelerator(device):
        return FoundDevice(host, "cpu", "a CPU", 0)
    card = card_facts(device)
    return FoundDevice(host, "gpu", card.name, card.memory_bytes)


def device_mismatch(
    planned: Sequence[PlannedDevice] | None, peaks_bytes: Sequence[int], found: Sequence[FoundDevice]
) -> PlanError | None:
    """The error for the first rank that is not on its planned device; None if there is none.

    ``planned`` is None for a plan file without devices, and empty for a bare program: then only the predicted
    peaks of memory are compared. If all ranks are on CPUs nothing is compared: either the testbed emulates
    the devices, with quotas for their speeds while every rank reports the host's one processor, or a plan for
    GPUs is being tried without any.
    """
    if all(f.kind == "cpu" for f in found):
        return None
    if planned:
        for rank in range(len(found)):
            if (reason := _difference(rank, planned, found)) is not None:
                return _refusal(rank, reason, planned, found)
    for rank, (peak_bytes, device) in enumerate(zip(peaks_bytes, found)):
        if device.kind == "gpu" and peak_bytes > device.memory_bytes:
            return PlanError(
                f"rank {rank} was planned for a larger device",
                expected=f"{size_text(peak_bytes)} of memory",
                got=str(device),
                hint=_hints(planned),
            )
    return None


def _difference(rank: int, planned: Sequence[PlannedDevice], found: Sequence[FoundDevice]) -> str | None:
    plan, device = planned[rank], found[rank]
    if plan.kind != device.kind:
        return "another device"
    if device.kind == "cpu":
        return None
    if not may_be(plan.device, device) or _is_mixed(rank, planned, found):
        return "another device"
    if device.memory_bytes < plan.memory_bytes * (1 - MEMORY_TOLERANCE):
        return "a larger device"
    return "another machine" if _is_moved(rank, planned, found) else None


class Reported(Protocol):
    """A device in the words of its driver."""

    @property
    def name(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...


def may_be(name: str, found: Reported) -> bool:
    """Whether a card may be the planned device; True for any name that is not in the catalogue."""
    name = _catalogue_name(name)
    if name not in CATALOGUE:
        return True
    row = catalogue_row(found.name, found.memory_bytes)
    if row is not None:
        return row.name == name
    model = name.rpartition("-")[0].upper()  # a form of the card that the catalogue lacks
    return model in re.sub(r"[\s\-_()]", "", found.name.upper())


def _is_mixed(rank: int, planned: Sequence[PlannedDevice], found: Sequence[FoundDevice]) -> bool:
    """Whether a device with a name outside of the catalogue is mixed up with another: the first rank of that
    name has another card, or another rank has a card of that name, which ``mixmesh detect`` gives to unknown
    cards."""
    name, card = planned[rank].device, found[rank].name
    if _catalogue_name(name) in CATALOGUE:
        return False
    first = next(f.name for p, f in zip(planned, found) if p.device == name and f.kind == "gpu")
    return card != first or (card != name and any(f.name == name for f in found))


def _catalogue_name(name: str) -> str:
    """A device's name without the number that ``mixmesh detect`` adds to distinguish cards of one row."""
    return name if name in CATALOGUE else re.sub(r"-\d+$", "", name)


def _is_moved(rank: int, planned: Sequence[PlannedDevice], found: Sequence[FoundDevice]) -> bool:
    """Whether the rank runs on another host than planned: the ranks of its machine are on several hosts, or
    the machines are named after the hosts and this host neither is nor equals the planned one."""
    plan, host = planned[rank], found[rank].host
    if next(f.host for p, f in zip(planned, found) if p.machine == plan.machine) != host:
        return True
    if {p.machine for p in planned} != {f.host for f in found}:
        return False  # a file written by hand has its own names
    return host not in {p.machine for p in planned if p.like == plan.like}


def _refusal(
    rank: int, reason: str, planned: Sequence[PlannedDevice], found: Sequence[FoundDevice]
) -> PlanError:
    plan = planned[rank]
    others = []
    if reason == "another device" and _catalogue_name(plan.device) in CATALOGUE:
        others = [r for r, f in enumerate(found) if f.kind == "gpu" and may_be(plan.device, f)]
    return PlanError(
        f"rank {rank} was planned for {reason}",
        expected=str(plan),
        got=f"{found[rank]}" + (f"; rank {others[0]} has a {plan.device}" if others else ""),
        hint=(
            *_hints(planned),
            "or delete the line devices = ... of the plan: then they are not compared",
        ),
    )


def _hints(planned: Sequence[PlannedDevice] | None) -> tuple[str, ...]:
    order = ": " + ", ".join(dict.fromkeys(p.machine for p in planned)) if planned else ""
    return (
        f"start the machines in the order of the cluster file{order} (torchrun --node-rank 0, 1, ...)",
        "or plan for what is there: torchrun ... -m mixmesh detect --out C.toml, then mixmesh plan",
    )
