"""The host, the device and the memory of every rank. Nothing here is measured, so it is the same at
every start on the same machines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import psutil
import torch

from ...errors import InputError
from ...measure.testbed.device import EMULATED_VARIABLE
from ...runtime.accelerator import card_facts, computes_bf16, is_accelerator
from ...runtime.first_rank import everyones
from ..catalogue import CatalogueRow, catalogue_row

CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 2**60  # cgroup v1 reports a number near 2**63 if there is no limit


@dataclass(frozen=True)
class FoundDevice:
    """One rank's device as the system reports it. ``memory_bytes`` is the limit for all its processes, and
    ``memory_pool`` identifies ranks that share it: ranks on CPUs of one host, or on one GPU. ``emulated``
    identifies the cluster that the testbed emulates with it, whose devices all report the same."""

    host: str
    kind: Literal["gpu", "cpu"]
    name: str
    memory_bytes: int
    memory_pool: str
    supports_bf16: bool
    num_threads: int
    emulated: str = ""

    @property
    def row(self) -> CatalogueRow | None:
        """The catalogue's row of the device, if it has one."""
        return catalogue_row(self.name, self.memory_bytes) if self.kind == "gpu" else None


@dataclass(frozen=True)
class Inventory:
    """The devices of all ranks, in rank order."""

    devices: tuple[FoundDevice, ...]

    @property
    def fingerprint(self) -> str:
        """12 hex digits of everything that is known before any measurement. Only the ranks of a memory pool
        count and not its name, which may be new at every start, like that of a job's cgroup."""
        pools = [device.memory_pool for device in self.devices]
        rows = [{**asdict(d), "memory_pool": pools.index(d.memory_pool)} for d in self.devices]
        facts = json.dumps(rows, sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:12]

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        runs = groupby(range(len(self.devices)), key=lambda rank: self.devices[rank].host)
        return tuple(tuple(ranks) for _, ranks in runs)

    def memory_bytes(self, rank: int) -> int:
        """The memory of one rank; ranks that share a pool have equal parts of it."""
        pool = self.devices[rank].memory_pool
        return self.devices[rank].memory_bytes // sum(d.memory_pool == pool for d in self.devices)


def read_inventory(device: torch.device) -> Inventory:
    """The inventory of all ranks. Collective. Raises InputError as ``inventory_of`` does."""
    return inventory_of(everyones(read_device(device)))


def inventory_of(devices: Sequence[FoundDevice]) -> Inventory:
    """The inventory of these devices, in rank order. Raises InputError if the ranks of a host are not
    consecutive, as they are under torchrun."""
    inventory = Inventory(tuple(devices))
    hosts = [devices[ranks[0]].host for ranks in inventory.machines]
    repeated = sorted({host for host in hosts if hosts.count(host) > 1})
    if repeated:
        ranks = [rank for rank, device in enumerate(inventory.devices) if device.host == repeated[0]]
        raise InputError(
            f"the ranks of the host {repeated[0]} do not follow each other",
            expected="all ranks of a host in a row, as torchrun numbers them",
            got=f"ranks {', '.join(map(str, ranks))}",
            hint="torchrun --nnodes N --nproc-per-node gpu ... on every host, or host names of their own",
        )
    return inventory


def read_device(device: torch.device) -> FoundDevice:
    """This process's device."""
    host = socket.gethostname()
    if is_accelerator(device):
        card = card_facts(device)
        return FoundDevice(
            host=host,
            kind="gpu",
            name=card.name,
            memory_bytes=card.memory_bytes,
            memory_pool=f"{host} gpu {card.uuid or device.index}",
            supports_bf16=computes_bf16(device),
            num_threads=0,
        )
    limit_bytes, cgroup = memory_limit(Path("/proc/self/cgroup"), CGROUPS)
    return FoundDevice(
        host=host,
        kind="cpu",
        name=platform.processor() or platform.machine() or "cpu",
        memory_bytes=min(limit_bytes, psutil.virtual_memory().total),
        memory_pool=f"{host} {cgroup}" if limit_bytes < NO_LIMIT_BYTES else host,
        supports_bf16=False,
        num_threads=threads_asked(os.environ.get("OMP_NUM_THREADS", "")) or torch.get_num_threads(),
        emulated=os.environ.get(EMULATED_VARIABLE, ""),
    )


def threads_asked(text: str) -> int:
    """The number of threads that OMP_NUM_THREADS asks for, the first of a list by level; 0 if it is empty, or
    no number."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdigit() else 0


def memory_limit(memberships: Path, mount: Path) -> tuple[int, str]:
    """The lowest memory limit among this process's cgroup and those above it, in bytes, with its cgroup;
    ``NO_LIMIT_BYTES`` if there is none. Handles both versions of cgroups."""
    limit_bytes, where = NO_LIMIT_BYTES, ""
    try:
        lines = memberships.read_text().splitlines()
    except OSError:
        return limit_bytes, where
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        file, root = ("memory.limit_in_bytes", mount / "memory") if controllers else ("memory.max", mount)
        folder = root / path.lstrip("/")
        for cgroup in (folder, *folder.parents):
            if not cgroup.is_relative_to(root):
                break
            value = read_number(cgroup / file)
            if value is not None and value < limit_bytes:
                limit_bytes, where = value, str(cgroup)
    return limit_bytes, where


def read_number(file: Path) -> int | None:
    """The integer in a file; None if there is no such file or no number in it ("max")."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
