"""Measures rates and latencies of the links inside each machine and between machines, by messages between two
ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.distributed as dist

from ...runtime.accelerator import is_on_device, synchronize
from ...runtime.messages import meet, message_group

PING_BYTES = 8
NUM_PINGS = 20
FIRST_BYTES = 2**18
LARGEST_BYTES = 2**26
LONG_ENOUGH_S = 0.05  # seconds from which a message gives the rate: latency is a small part of it
MOST_PAIRS = 28  # pairs of machines: beyond that, each machine is measured with the next few only


@dataclass(frozen=True)
class Link:
    """A path between two devices: bytes per second one way, and seconds until the first byte arrives."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Links:
    """Links by index of machine: ``inside`` each machine with two devices or more, and ``between`` pairs of
    machines."""

    inside: dict[int, Link]
    between: dict[tuple[int, int], Link]


def measure_links(machines: Sequence[Sequence[int]], device: torch.device) -> Links:
    """The links between the first two ranks of every machine, and between the first ranks of machines, each
    given by its ranks. Collective."""
    inside = {
        index: measure_pair(ranks[0], ranks[1], device)
        for index, ranks in enumerate(machines)
        if len(ranks) > 1
    }
    between = {
        (a, b): measure_pair(machines[a][0], machines[b][0], device) for a, b in machine_pairs(len(machines))
    }
    return Links(inside, between)


def machine_pairs(num_machines: int) -> tuple[tuple[int, int], ...]:
    """Every two machines; of many, each with the next few in a ring, so that each is in several pairs."""
    every = tuple(combinations(range(num_machines), 2))
    if len(every) <= MOST_PAIRS:
        return every
    ends = {(a, (a + d) % num_machines) for a in range(num_machines) for d in (1, 2)}
    return tuple(sorted({(min(pair), max(pair)) for pair in ends}))


def measure_pair(rank_a: int, rank_b: int, device: torch.device) -> Link:
    """The link between two ranks while no other rank sends. Collective: the others wait."""
    meet()
    link: list[Link | None] = [None]
    if dist.get_rank() in (rank_a, rank_b):
        link[0] = exchange(rank_a, rank_b, device)
    dist.broadcast_object_list(link, src=rank_a, group=message_group())
    assert link[0] is not None  # rank_a has measured it
    return link[0]


def exchange(rank_a: int, rank_b: int, device: torch.device) -> Link:
    """The link as measured by ``rank_a``: half a round trip of a few bytes, then messages that double in
    size. ``rank_a`` decides when to stop, because two ranks might decide differently by their own clocks."""
    is_first = dist.get_rank() == rank_a
    # gloo only sends host memory, so training reaches this rate
    where = device if is_on_device() else torch.device("cpu")
    ping = torch.zeros(PING_BYTES, dtype=torch.uint8, device=where)
    peer = rank_b if is_first else rank_a
    trips_s = [round_trip_s(ping, ping, peer, is_first) for _ in range(NUM_PINGS)]
    latency_s = statistics.median(trips_s[2:]) / 2
    size_bytes = FIRST_BYTES
    while True:
        payload = torch.zeros(size_bytes, dtype=torch.uint8, device=where)
        # twice: the first message of a size may set up buffers
        sent_s = min(round_trip_s(payload, ping, peer, is_first) for _ in range(2))
        message_s = max(sent_s - 2 * latency_s, 1e-9)
        next_bytes = torch.tensor(next_size_bytes(size_bytes, message_s), device=where)
        if is_first:
            dist.send(next_bytes, peer)
        else:
            dist.recv(next_bytes, peer)
        if not next_bytes:
            return Link(size_bytes / message_s, latency_s)
        size_bytes = int(next_bytes)


def next_size_bytes(size_bytes: int, message_s: float) -> int:
    """The size of the next message after one that took ``message_s``; 0 if that one already determines the
    rate."""
    if message_s >= LONG_ENOUGH_S or size_bytes >= LARGEST_BYTES:
        return 0
    return size_bytes * (2 if message_s > LONG_ENOUGH_S / 8 else 8)


def round_trip_s(payload: torch.Tensor, answer: torch.Tensor, peer: int, is_first: bool) -> float:
    """Seconds until the peer has ``payload`` and its ``answer`` is here."""
    started = time.perf_counter()
    if is_first:
        dist.send(payload, peer)
        dist.recv(answer, peer)
    else:
        dist.recv(payload, peer)
        dist.send(answer, peer)
    synchronize(payload.device)
    return time.perf_counter() - started
