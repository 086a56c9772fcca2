"""The checks, one function each, returning the findings in a line. All ranks call them together and judge by
all ranks' findings, so they all raise the same error."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...base.units import ranks_text, size_text
from ...cluster.detection.inventory import FoundDevice, inventory_of, read_device
from ...cluster.detection.links import machine_pairs
from ...errors import CollectiveError, InputError, MixmeshError
from ...runtime.accelerator import HOST_BACKEND
from ...runtime.agreement import by_value, difference, outliers
from ...runtime.comm import leave
from ...runtime.interfaces import host_towards_store
from ...runtime.launch_store import own_connection
from ...runtime.processes import process_place
from .ground import Ground, Note, count
from .meeting import PREFIX
from .reach import Address, Listener, call_all, look_up_all, mapped, own_host

SHARED_FOLDER = Path("/dev/shm")
LEAST_SHARED_BYTES = 128 * 2**20  # containers have 64 MiB by default, which a loader's workers soon fill
LOOK_UP_S = 1.0  # a name server that answers takes milliseconds
LEAST_CACHE_BYTES = 64 * 2**20  # profiles and plans have a few MiB at most


def rendezvous(ground: Ground) -> str:
    """Checks that all ranks of the launch are there."""

    def make() -> list[str | int]:
        place = process_place().split(" ")[0]  # the machine's boot id, which changes when it restarts
        return [socket.gethostname(), os.environ.get("GROUP_RANK", ""), place, process_place(), os.getpid()]

    told = ground.meeting.gather("the rendezvous", make)
    ground.hosts = ground.columns["host"] = [one[0] for one in told]
    ground.meeting.processes = [(place, pid) for *_, place, pid in told]
    machines = by_value({rank: str(one[:3]) for rank, one in enumerate(told)})
    ground.machines = tuple(tuple(ranks) for ranks in machines.values())
    for host in sorted(set(ground.hosts)):  # all ranks name the same one
        ranks = [rank for rank, one in enumerate(told) if one[0] == host]
        if len({told[rank][2] for rank in ranks}) > 1:
            raise InputError(
                f'two machines have the host name "{host}"',
                expected="a name of its own for every machine: devices are grouped by it",
                got=ranks_text(ranks),
                hint="hostnamectl set-hostname NAME on one of them",
                ranks=tuple(ranks),
            )
    if ground.meeting.world_size == 1:
        return "one process; with others under torchrun"
    return f"{count(len(told), 'rank')} on {count(len(set(ground.hosts)), 'host')}"


def devices(ground: Ground) -> str:
    """Checks that every rank has a device that computes, and that one backend serves all ranks."""

    def make() -> list[Any]:
        ones = torch.ones(2, 2, device=ground.device)
        # raises an error if this build of PyTorch has no kernels for the card
        if float((ones @ ones).sum()) != 8:
            raise InputError("the device computes a product of ones wrongly", got=str(ground.device))
        return [asdict(read_device(ground.device)), ground.backend]

    told = ground.meeting.gather("the look at devices", make)
    ground.devices = [FoundDevice(**fields) for fields, _ in told]
    backends = [backend for _, backend in told]
    if got := difference(backends):
        raise InputError(
            "the ranks cannot talk to each other: they would choose other backends",
            expected="a GPU for every rank (nccl), or ranks on CPUs or on shared GPUs everywhere (gloo)",
            got=got,
            hint=(
                "nvidia-smi and python -c 'import torch; print(torch.cuda.device_count())' on each machine",
                "torchrun --nproc-per-node gpu: one process for each GPU",
            ),
            ranks=outliers(backends),
        )
    inventory = inventory_of(ground.devices)
    ground.columns["device"] = [device.name for device in ground.devices]
    ground.columns["memory"] = [size_text(inventory.memory_bytes(rank)) for rank in range(len(told))]
    names = by_value({rank: device.name for rank, device in enumerate(ground.devices)})
    return ", ".join(f"{len(ranks)} x {name}" for name, ranks in names.items()) + f", by {told[0][1]}"


def reachability(ground: Ground) -> str:
    """Checks that the first processes of all machines can reach each other, in both directions."""
    firsts = [ranks[0] for ranks in ground.machines]
    pairs = [(firsts[a], firsts[b]) for a, b in machine_pairs(len(firsts))]
    if not pairs:
        return "one machine: nothing to reach"
    rank, listeners = ground.meeting.rank, []

    def listen() -> list[Any]:
        if rank not in firsts:
            return []
        listeners.append(Listener(own_host(ground.backend)))
        return list(asdict(listeners[0].address).values())

    def reach() -> dict[int, tuple[float, str]]:
        own = {b if rank == a else a for a, b in pairs if rank in (a, b)}
        return call_all({peer: Address(*told[peer]) for peer in sorted(own)})

    try:
        told = ground.meeting.gather("the choice of addresses", listen)
        reached = ground.meeting.gather("the calls between machines", reach)
    finally:
        for listener in listeners:
            listener.close()
    lost = [(a, int(b), wrong) for a, of in enumerate(reached) for b, (_, wrong) in of.items() if wrong]
    if lost:
        raise unreached(ground, told, lost)
    slowest_s = max(time_s for of in reached for time_s, _ in of.values())
    return f"{count(len(pairs), 'pair')} of machines, both ways, the slowest in {slowest_s * 1e3:.2g} ms"


def names(ground: Ground) -> str | Note:
    """Checks that the first rank's machine soon finds the names of all machines' addresses, or that there are
    none. PyTorch looks them up, and the store of a launch answers nobody meanwhile."""

    def look_up() -> dict[str, float]:
        return {} if ground.meeting.rank else look_up_all(list(dict.fromkeys(told)))

    told = ground.meeting.gather("the choice of addresses", host_towards_store)
    times_s = ground.meeting.gather("the look-up of names", look_up)[0]
    slowest = max(times_s, key=times_s.__getitem__)
    if times_s[slowest] > LOOK_UP_S:
        return Note(
            f"the first rank's machine takes {times_s[slowest]:.1f} s to look up the name of {slowest}: at a "
            "start, connections may wait as long",
            (
                f'a line "{mapped(slowest)} NAME" in its /etc/hosts',
                'or "options timeout:1 attempts:1" in its /etc/resolv.conf',
            ),
            ranks=(0,),
        )
    return f"addresses looked up in {times_s[slowest] * 1e3:.2g} ms on the first rank's machine"


def unreached(ground: Ground, told: list[Any], lost: list[tuple[int, int, str]]) -> CollectiveError:
    """The first of the connections that failed: (from rank, to rank, reason)."""
    a, b, wrong = lost[0]
    others = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    return CollectiveError(
        f'rank {a} on "{ground.hosts[a]}" does not reach rank {b} on "{ground.hosts[b]}"{others}',
        expected=f"a connection to {told[b][0]}, port {told[b][1]} (any free port)",
        got=wrong,
        hint=(
            f"GLOO_SOCKET_IFNAME on {ground.hosts[b]} (or NCCL_SOCKET_IFNAME): its interface for the others",
            "let firewalls pass all ports between the machines",
        ),
        ranks=(a, b),
    )


def collectives(ground: Ground) -> str:
    """Checks that a sum over all ranks is right, in the backend that training uses."""
    meeting = ground.meeting

    def make() -> list[float]:
        ground.take_device()
        # a separate connection: while the group waits for a key on one, no other thread can use that to ask
        # whether a rank has failed
        store = own_connection(meeting.store)
        dist.init_process_group(
            ground.backend,
            store=dist.PrefixStore(f"{PREFIX}/group", store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=ground.group_timeout_s),
        )
        sums = [sum_of_ranks(ground.device)]
        if ground.backend != HOST_BACKEND:  # ranks also exchange small messages by gloo
            sums.append(sum_of_ranks(torch.device("cpu"), dist.new_group(backend=HOST_BACKEND)))
        return sums

    told = meeting.gather_together("a sum over all ranks", make)
    expected = meeting.world_size * (meeting.world_size + 1) / 2
    wrong = {rank: sums for rank, sums in enumerate(told) if set(sums) != {expected}}
    backends = tuple(dict.fromkeys((ground.backend, HOST_BACKEND)))
    if wrong:
        raise CollectiveError(
            f"a sum over all ranks is wrong on {ranks_text(sorted(wrong))}",
            expected=f"{expected:g} by {' and by '.join(backends)}",
            got="; ".join(
                f"rank {rank}: {', '.join(f'{s:g}' for s in sums)}" for rank, sums in wrong.items()
            ),
            hint="NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1, then again: tells which path is broken",
            ranks=tuple(wrong),
        )
    return f"a sum over {count(meeting.world_size, 'rank')} by {' and '.join(backends)}"


def sum_of_ranks(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """The sum of all ranks' numbers, counted from 1. Collective."""
    value = torch.full((1,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(value, group=group)
    return float(value)


def leave_group(ground: Ground) -> None:
    """Ends the process group that ``collectives`` made, if all ranks can. Collective."""

    def make() -> None:
        ground.take_device()
        leave()

    if dist.is_initialized() and not ground.is_over and not ground.is_abandoned:
        with suppress(MixmeshError):
            ground.meeting.gather_together("the end of the group", make)


def shared_memory(ground: Ground) -> str:
    """Checks that the workers of loaders have enough shared memory to pass batches on."""

    def make() -> int | None:
        return shutil.disk_usage(SHARED_FOLDER).free if SHARED_FOLDER.is_dir() else None

    told = ground.meeting.gather("the look at shared memory", make)
    free = {rank: size_bytes for rank, size_bytes in enumerate(told) if size_bytes is not None}
    if not free:
        return "not of this system"
    rank = min(free, key=free.__getitem__)
    if free[rank] < LEAST_SHARED_BYTES:
        raise InputError(
            f'shared memory is short on host "{ground.hosts[rank]}"',
            expected=f"{size_text(LEAST_SHARED_BYTES)} free in {SHARED_FOLDER}, for the workers of loaders",
            got=size_text(free[rank]),
            hint=(
                "docker run --shm-size 8g, or in Kubernetes an emptyDir of medium Memory at /dev/shm",
                "or num_workers=0",
            ),
            ranks=tuple(other for other, host in enumerate(ground.hosts) if host == ground.hosts[rank]),
        )
    return f"{size_text(free[rank])} free" + (" at least" if len(set(ground.hosts)) > 1 else "")


def cache(ground: Ground) -> str:
    """Checks that the first rank can write to the cache."""

    def make() -> int:
        if ground.meeting.rank:
            return 0
        try:
            ground.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=ground.cache):
                return shutil.disk_usage(ground.cache).free
        except OSError as error:
            raise InputError(
                "the cache cannot be written, so that every start measures and plans anew",
                expected="a folder that this user may write to",
                got=error.strerror or str(error),
                where=str(ground.cache),
                hint="--cache DIR, or MIXMESH_CACHE=DIR",
            ) from None

    free_bytes = ground.meeting.gather("the look at the cache", make)[0]
    if free_bytes < LEAST_CACHE_BYTES:
        raise InputError(
            "the disk of the cache is full",
            expected=f"{size_text(LEAST_CACHE_BYTES)} free",
            got=size_text(free_bytes),
            where=str(ground.cache),
            hint="--cache DIR, or MIXMESH_CACHE=DIR, on another disk",
            ranks=(0,),
        )
    return f"{size_text(free_bytes)} free on the first rank's disk"
