"""Devices as cgroups: a CPU quota, a memory limit and an account of both. One interface, two versions.

Every rank has a *compute* cgroup with the quota and a *free* one without, where its process starts (see
``device``). The bed as a whole has a high weight: with the default weight, another process on the machine
cut a measured speed-up from 2.0 to 1.3.
"""

from __future__ import annotations

import errno
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass

from .device import COMPUTE_VARIABLE, FREE_VARIABLE, MEMORY_PEAK_VARIABLE
from .system import read, read_table, write

# short enough for collectives, long enough for operators; 5, 10 and 100 ms gave the same rates. With 5 ms a
# rank that waits for a collective catches up less: docs/decisions/0049-burst-credit.md.
PERIOD_US = 20_000
TAKEN_MARGIN_BYTES = 2**19
MIN_QUOTA_US = 1_000  # the kernel's limit


@dataclass(frozen=True)
class Audit:
    """The CPU time and memory that one device used, by the kernel's account."""

    cpu_s: float
    throttled_s: float
    memory_peak_bytes: int | None
    memory_kills: int


def quota_us(share: float) -> tuple[int, int]:
    """The quota and the period; a small share gets a longer period, because the kernel requires a quota of at
    least 1 ms."""
    period = min(1_000_000, max(PERIOD_US, round(MIN_QUOTA_US / share)))
    return max(MIN_QUOTA_US, round(share * period)), period


class Cgroups(ABC):
    """The cgroups of one bed. ``paths`` is known before anything is made, for the journal."""

    version: int

    @abstractmethod
    def paths(self) -> list[str]:
        """Every directory that ``create`` makes, parents first."""

    @abstractmethod
    def create(self) -> None: ...

    @abstractmethod
    def set_share(self, rank: int, share: float | None) -> None: ...

    @abstractmethod
    def set_memory(self, rank: int, size_bytes: int) -> None: ...

    @abstractmethod
    def memory_bytes(self, rank: int) -> int:
        """The memory that the rank's device holds now."""

    @abstractmethod
    def memory_limit_bytes(self, rank: int) -> int:
        """The limit of the rank's device, as written by ``set_memory``."""

    def take_memory(self, rank: int) -> None:
        """Lowers the limit to the current use plus a margin; a limit that is already lower stays."""
        size_bytes = self.memory_bytes(rank) + TAKEN_MARGIN_BYTES
        if size_bytes < self.memory_limit_bytes(rank):
            try:
                self.set_memory(rank, size_bytes)
            except OSError as error:
                if error.errno != errno.EBUSY:  # version 1, if more is held by now
                    raise

    @abstractmethod
    def join_files(self, rank: int) -> tuple[str, ...]:
        """The files through which a process joins the rank's free cgroup and its account, by writing "0" to
        each."""

    @abstractmethod
    def worker_env(self, rank: int) -> dict[str, str]: ...

    @abstractmethod
    def audit(self, rank: int) -> Audit: ...


class CgroupsV1(Cgroups):
    """The cgroups ``rN`` (compute) and ``rNfree`` under ``cpu`` and ``cpuacct``, and ``rN`` under
    ``memory``."""

    version = 1

    def __init__(self, mounts: dict[str, str], bed: str, world_size: int) -> None:
        # cpu and cpuacct are often one hierarchy, with a single path
        self._cpu, self._account, self._memory = (f"{mounts[c]}/{bed}" for c in ("cpu", "cpuacct", "memory"))
        self._world_size = world_size

    def paths(self) -> list[str]:
        paths = [self._cpu, self._account, self._memory]
        for rank in range(self._world_size):
            paths += [f"{top}/r{rank}{kind}" for top in (self._cpu, self._account) for kind in ("", "free")]
            paths.append(f"{self._memory}/r{rank}")
        return list(dict.fromkeys(paths))

    def create(self) -> None:
        for path in self.paths():
            os.mkdir(path)
        write(f"{self._cpu}/cpu.shares", 262_144)
        for rank in range(self._world_size):
            write(f"{self._cpu}/r{rank}free/cpu.shares", 8192)

    def set_share(self, rank: int, share: float | None) -> None:
        path = f"{self._cpu}/r{rank}"
        write(f"{path}/cpu.cfs_quota_us", -1)  # a quota above the new period would be refused
        if share is not None:
            quota, period = quota_us(share)
            write(f"{path}/cpu.cfs_period_us", period)
            write(f"{path}/cpu.cfs_quota_us", quota)

    def set_memory(self, rank: int, size_bytes: int) -> None:
        path = f"{self._memory}/r{rank}"
        limits = [f"{path}/memory.limit_in_bytes"]
        with_swap = f"{path}/memory.memsw.limit_in_bytes"
        # no swap beyond the limit, which must never be below the first one, not even for a moment
        if os.path.exists(with_swap):
            limits.insert(int(size_bytes <= int(read(with_swap))), with_swap)
        for limit in limits:
            write(limit, size_bytes)

    def memory_bytes(self, rank: int) -> int:
        return int(read(f"{self._memory}/r{rank}/memory.usage_in_bytes"))

    def memory_limit_bytes(self, rank: int) -> int:
        return int(read(f"{self._memory}/r{rank}/memory.limit_in_bytes"))

    def join_files(self, rank: int) -> tuple[str, ...]:
        tops = (f"{self._cpu}/r{rank}free", f"{self._account}/r{rank}free", f"{self._memory}/r{rank}")
        return tuple(f"{path}/cgroup.procs" for path in dict.fromkeys(tops))

    def worker_env(self, rank: int) -> dict[str, str]:
        return {
            COMPUTE_VARIABLE: f"{self._cpu}/r{rank}/tasks",
            FREE_VARIABLE: f"{self._cpu}/r{rank}free/tasks",
            MEMORY_PEAK_VARIABLE: f"{self._memory}/r{rank}/memory.max_usage_in_bytes",
        }

    def audit(self, rank: int) -> Audit:
        used_ns = sum(int(read(f"{self._account}/r{rank}{kind}/cpuacct.usage")) for kind in ("", "free"))
        memory = f"{self._memory}/r{rank}"
        return Audit(
            cpu_s=used_ns / 1e9,
            throttled_s=read_table(f"{self._cpu}/r{rank}/cpu.stat")["throttled_time"] / 1e9,
            memory_peak_bytes=int(read(f"{memory}/memory.max_usage_in_bytes")),
            memory_kills=read_table(f"{memory}/memory.oom_control").get("oom_kill", 0),
        )


class CgroupsV2(Cgroups):
    """``rN`` holds the memory limit; below it, in threaded mode, ``rN/compute`` and ``rN/free``."""

    version = 2

    def __init__(self, mount: str, bed: str, world_size: int) -> None:
        self._mount, self._top = mount, f"{mount}/{bed}"
        self._world_size = world_size

    def _rank(self, rank: int) -> str:
        return f"{self._top}/r{rank}"

    def paths(self) -> list[str]:
        ranks = [
            self._rank(rank) + kind for rank in range(self._world_size) for kind in ("", "/compute", "/free")
        ]
        return [self._top, *ranks]

    def create(self) -> None:
        os.mkdir(self._top)
        enabled = read(f"{self._mount}/cgroup.subtree_control").split()
        for controller in ("cpu", "memory"):
            if controller not in enabled:
                write(f"{self._mount}/cgroup.subtree_control", f"+{controller}")
            write(f"{self._top}/cgroup.subtree_control", f"+{controller}")
        write(f"{self._top}/cpu.weight", 10_000)
        for path in self.paths()[1:]:
            os.mkdir(path)
            if path.endswith(("/compute", "/free")):
                write(f"{path}/cgroup.type", "threaded")
        for rank in range(self._world_size):
            write(f"{self._rank(rank)}/cgroup.subtree_control", "+cpu")
            write(f"{self._rank(rank)}/free/cpu.weight", 800)

    def set_share(self, rank: int, share: float | None) -> None:
        value = "max" if share is None else "{} {}".format(*quota_us(share))
        write(f"{self._rank(rank)}/compute/cpu.max", value)

    def set_memory(self, rank: int, size_bytes: int) -> None:
        write(f"{self._rank(rank)}/memory.max", size_bytes)
        if os.path.exists(f"{self._rank(rank)}/memory.swap.max"):
            write(f"{self._rank(rank)}/memory.swap.max", 0)

    def memory_bytes(self, rank: int) -> int:
        return int(read(f"{self._rank(rank)}/memory.current"))

    def memory_limit_bytes(self, rank: int) -> int:
        limit = read(f"{self._rank(rank)}/memory.max").strip()
        return sys.maxsize if limit == "max" else int(limit)

    def join_files(self, rank: int) -> tuple[str, ...]:
        return (f"{self._rank(rank)}/free/cgroup.procs",)

    def worker_env(self, rank: int) -> dict[str, str]:
        return {
            COMPUTE_VARIABLE: f"{self._rank(rank)}/compute/cgroup.threads",
            FREE_VARIABLE: f"{self._rank(rank)}/free/cgroup.threads",
            MEMORY_PEAK_VARIABLE: f"{self._rank(rank)}/memory.peak",
        }

    def audit(self, rank: int) -> Audit:
        path = self._rank(rank)
        peak = f"{path}/memory.peak"  # from Linux 5.19 on
        return Audit(
            cpu_s=read_table(f"{path}/cpu.stat")["usage_usec"] / 1e6,
            throttled_s=read_table(f"{path}/compute/cpu.stat")["throttled_usec"] / 1e6,
            memory_peak_bytes=int(read(peak)) if os.path.exists(peak) else None,
            memory_kills=read_table(f"{path}/memory.events").get("oom_kill", 0),
        )


def find_mounts() -> tuple[dict[str, str], str | None]:
    """The mount of each cgroup v1 controller, and that of a cgroup v2 with cpu and memory, if any."""
    controllers: dict[str, str] = {}
    unified = None
    for line in read("/proc/self/mounts").splitlines():
        _, path, kind, options = line.split()[:4]
        if kind == "cgroup":
            controllers |= {name: path for name in options.split(",")}
        elif kind == "cgroup2" and {"cpu", "memory"} <= set(read(f"{path}/cgroup.controllers").split()):
            unified = path
    return {name: controllers[name] for name in ("cpu", "cpuacct", "memory") if name in controllers}, unified


def open_cgroups(bed: str, world_size: int) -> Cgroups:
    """The cgroups of a machine on which ``probe`` found some."""
    mounts, unified = find_mounts()
    return CgroupsV2(unified, bed, world_size) if unified else CgroupsV1(mounts, bed, world_size)
