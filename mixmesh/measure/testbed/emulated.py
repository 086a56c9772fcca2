"""A mixed cluster on one machine: machines are network namespaces, devices are processes with quotas.

Emulated are a machine's network rate (the smaller of its nic's and the network's, both ways), a device's
share of a CPU core once its computing thread has entered (``enter_device``), and its memory. Not emulated are
latency beyond the natural one, the link inside a machine (loopback), and several paths at once through a nic
that is faster than the network. A share is not a speed, as caches are cold after throttling: profile the
devices.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from ...cluster import Cluster
from ...errors import InputError, TestbedUnavailable
from . import journal
from .bed import Bed
from .capability import probe
from .cgroups import open_cgroups
from .device import JOIN_VARIABLE
from .network import Network, open_namespace
from .processes import OnOutput, Rank
from .result import RankResult
from .system import BOOT_ID, CommandFailed, enter_machine, mount_memory, start_time

MASTER_PORT = 29500  # free in a new namespace, and below the range of outgoing connections
MAX_LOAD = 0.8  # share of all cores; beyond it, devices take time from each other


class Testbed(Bed):
    """``with Testbed(cluster) as bed: bed.spawn(argv); bed.wait()``.

    Raises ``TestbedUnavailable`` on entering if a cluster cannot be emulated.
    """

    __test__ = False  # the name begins with "Test": keep pytest from collecting it
    emulation = "quota"

    def __init__(self, cluster: Cluster, *, on_output: OnOutput | None = None) -> None:
        super().__init__(cluster, on_output=on_output)
        self._journal: journal.Journal | None = None

    def _open(self) -> None:
        probe().require()
        journal.sweep()
        for text in warnings(self.cluster):
            print(f"mixmesh testbed: {text}", file=sys.stderr)
        bed = f"mm{secrets.token_hex(4)}"
        self._network = Network(bed, len(self.cluster.machines))
        self._cgroups = open_cgroups(bed, self.cluster.world_size)
        pid = os.getpid()
        self._journal = journal.Journal(
            bed, pid, start_time(pid) or "", tuple(self._network.namespaces), tuple(self._cgroups.paths())
        )
        try:
            self._journal.save()  # saved before anything in it is created
            self._journal.hosts_path.write_text(self._hosts())
            for machine in range(len(self.cluster.machines)):
                self._journal.boot_path(machine).write_text(f"{uuid.uuid4()}\n")
            self._create()
        except (OSError, CommandFailed) as error:
            raise TestbedUnavailable(
                "setting up the emulated cluster failed",
                got=str(error),
                hint="run as root, outside a sandbox",
            ) from None

    def _create(self) -> None:
        self._network.create()
        for index in range(len(self.cluster.machines)):
            self._network.set_rate(index, _rate(self.cluster, index))
        self._cgroups.create()
        for rank, device in enumerate(self.cluster.devices):
            self._cgroups.set_share(rank, device.cpu_share)
            self._cgroups.set_memory(rank, device.memory_bytes)

    def _hosts(self) -> str:
        # without this file torch.distributed would query a name server, which does not exist; it looks up
        # IPv4 addresses mapped to IPv6
        lines = ["127.0.0.1 localhost"]
        for index, machine in enumerate(self.cluster.machines):
            name, address = host_name(machine.name).decode(), self._network.address(index)
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        return "\n".join(lines) + "\n"

    def _close(self) -> None:
        if self._journal is not None:
            journal.remove(self._journal)

    def _rank_env(self, rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": self._network.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            JOIN_VARIABLE: os.pathsep.join(self._cgroups.join_files(rank)),
            **self._cgroups.worker_env(rank),
        }

    def address(self, machine: int | None) -> str:
        return self._network.address(machine)

    def _entering(self, rank: int) -> Callable[[], None]:
        enter_machine = self._entering_machine(self.cluster.machine_index_of(rank))
        files = self._cgroups.join_files(rank)

        def enter() -> None:
            for path in files:
                with open(path, "w") as file:
                    file.write("0")
            enter_machine()

        return enter

    def _entering_machine(self, machine: int | None) -> Callable[[], None]:
        assert self._journal is not None, "enter the bed first"
        hosts_file = os.fsencode(self._journal.hosts_path)
        namespace = self._network.namespace(machine)
        host = host_name("outside" if machine is None else self.cluster.machines[machine].name)
        boot_file = BOOT_ID if machine is None else os.fsencode(self._journal.boot_path(machine))

        def enter() -> None:
            namespace_fd = open_namespace(namespace)
            enter_machine(namespace_fd, host, hosts_file, boot_file)
            os.close(namespace_fd)

        return enter

    def _result(self, number: int, rank: Rank) -> RankResult:
        audit = self._cgroups.audit(number)
        returncode = rank.returncode or 0
        return RankResult(
            rank=number,
            returncode=returncode,
            cpu_s=audit.cpu_s,
            throttled_s=audit.throttled_s,
            memory_peak_bytes=audit.memory_peak_bytes,
            memory_limit_bytes=self.cluster.devices[number].memory_bytes,
            killed_by_memory_limit=audit.memory_kills > 0 and returncode != 0,
            ended_by_launcher=rank.ended_by_launcher,
        )

    def set_rate(self, machine: int, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise InputError("a rate is above 0", expected="bytes per second", got=str(bytes_per_s))
        self._network.set_rate(machine, bytes_per_s)

    def set_share(self, rank: int, share: float) -> None:
        if not 0 < share <= 1:
            raise InputError("a share is above 0 and at most 1", expected="a share of a core", got=str(share))
        self._cgroups.set_share(rank, share)

    def set_link(self, machine: int, is_up: bool) -> None:
        self._network.set_link(machine, is_up)

    def take_memory(self, rank: int) -> None:
        self._cgroups.take_memory(rank)

    def return_memory(self, rank: int) -> None:
        self._cgroups.set_memory(rank, self.cluster.devices[rank].memory_bytes)

    def make_disk(self, size_bytes: int) -> Path:
        assert self._journal is not None, "enter the bed first"
        path = self._journal.disk_path
        path.mkdir()
        mount_memory(path, size_bytes)
        return path


def warnings(cluster: Cluster) -> list[str]:
    """Warnings about an emulated cluster whose figures would be doubtful."""
    texts = []
    cores = len(os.sched_getaffinity(0))
    load = sum(device.cpu_share or 1.0 for device in cluster.devices)
    free = [str(rank) for rank, device in enumerate(cluster.devices) if device.cpu_share is None]
    if free:
        texts.append(f"no cpu_share, so not slowed: rank {', '.join(free)} (counted as one core each)")
    if load > MAX_LOAD * cores:
        texts.append(
            f"the CPU shares add up to {load:.3g} cores, above {MAX_LOAD:g} of the {cores} here: "
            "devices will steal from each other; use smaller shares"
        )
    return texts


def host_name(machine: str) -> bytes:
    """A host name that Linux accepts."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", machine).encode()[:64]


def _rate(cluster: Cluster, machine: int) -> float:
    return min(cluster.machines[machine].nic_bytes_per_s, cluster.bandwidth_bytes_per_s)
