"""Measures how communication and computing slow each other down on one device.

Gradients are summed while the backward pass goes on. Both use the device's memory, and on a CPU its caches;
and the computing thread itself copies and issues what is sent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ...cost import Curve, LinkMeasurement, default_algorithm, host_key
from ...lang.ir import REPLICATE, Shard
from ...runtime import collectives
from ...runtime.accelerator import backend_of, synchronize
from ...runtime.collectives import Handle
from ...runtime.comm import Channel, Comm
from ...runtime.layout import Layout
from ...runtime.messages import meet
from ...runtime.redistribute import between
from .limit import BESIDE, Limit
from .links import ALGORITHMS, EVEN, Case, prepared, rows_of
from .meter import Meter

WINDOW_S = 0.3  # seconds of computing alone, and about as long during communication
ROUNDS = 3
BUCKET_BYTES = (2**12, 2**22)
PIECE_BYTES = (2**12, 2**21)
PIECE_S = 0.06  # limit on the seconds of a collective of the larger size
REPEATS = 5
REDISTRIBUTIONS = 8  # different pieces in one pass
MAX_SUMS = 64  # limit on the sums made one after the other
SIDE = 160  # side of the square matrices that are multiplied meanwhile


@dataclass(frozen=True)
class Overlap:
    """The members of ``DeviceProfile`` that are measured here."""

    slowdown: float = 0.0
    host_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    beside_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    redistribution_s: float = 0.0


def measure_overlap(comm: Comm, links: tuple[LinkMeasurement, ...], limit: Limit | None = None) -> Overlap:
    """Measures all members; those for which ``limit`` leaves no time keep their defaults. What an
    all_reduce costs the devices is measured in any case, in about a second: a slow CPU spends as much on them
    as on operators, and without it a plan would give it work that holds up all others. Collective."""
    if comm.world_size < 2:
        return Overlap()
    channel = comm.channel(comm.everyone, "profile of all_reduce beside computing")
    if comm.device.type != "cpu":
        few, many = (bucket_s(channel, size) for size in BUCKET_BYTES)
        host_s = {"all_reduce": line(BUCKET_BYTES, (few, many))}
        return Overlap(0.0 if is_over(limit) else slowdown(comm, channel, links), host_s)
    # before the many lines below, because every plan sums gradients beside computing
    slowed = 0.0 if is_over(limit) else slowdown(comm, channel, links)
    redistributed_s = redistribution_s(comm)
    host_s, beside_s = {}, {}
    sizes = PIECE_BYTES[0], largest_bytes(links, comm.world_size, PIECE_BYTES, PIECE_S)
    for case in everyone_cases(comm):
        key = host_key(case.collective, case.algorithm)
        (own_s, others_s), (more_own_s, more_others_s) = (
            exchange_s(comm, channel, case, size) for size in sizes
        )
        host_s[key] = line(sizes, (own_s, more_own_s))
        beside_s[key] = line(sizes, (others_s, more_others_s))
        if is_over(limit):
            break
    return Overlap(slowed, host_s, beside_s, redistributed_s)


def is_over(limit: Limit | None) -> bool:
    """Whether no time is left for this. Collective."""
    return limit is not None and limit.is_past(BESIDE)


def slowdown(comm: Comm, channel: Channel, links: tuple[LinkMeasurement, ...]) -> float:
    size, count = window(links, comm.world_size)
    buffers = [torch.zeros(size // 4, device=comm.device) for _ in range(2)]  # sums of zeros stay zero
    unit = piece_of_work(comm.device)
    unit()
    slowdowns = []
    for _ in range(ROUNDS):
        meet()
        until = time.perf_counter() + WINDOW_S
        alone = per_second(unit, partial(is_past, until))
        meet()
        handles = [collectives.all_reduce.start(channel, buffers[n % 2], in_place=True) for n in range(count)]
        beside = per_second(unit, partial(are_ready, handles))
        for handle in handles:
            handle.wait()
        if beside > 0:
            slowdowns.append(alone / beside - 1)
    return min(max(statistics.median(slowdowns), 0.0), 1.0) if slowdowns else 0.0


def is_past(moment_s: float) -> bool:
    return time.perf_counter() >= moment_s


def are_ready(handles: Sequence[Handle]) -> bool:
    return all(handle.is_ready() for handle in handles)


def window(links: tuple[LinkMeasurement, ...], world_size: int) -> tuple[int, int]:
    """The bytes of an all_reduce between all ranks, and the number of them that fills the window."""
    curve = all_reduce_curve(links, world_size)
    fitting = [p for p in curve.points if p[0] <= BUCKET_BYTES[1] and p[1] <= WINDOW_S]
    size, seconds = max(fitting, default=curve.points[0])
    return int(size), min(max(2, math.ceil(WINDOW_S / seconds)), MAX_SUMS)


def all_reduce_curve(links: tuple[LinkMeasurement, ...], world_size: int) -> Curve:
    return next(m.curve for m in links if m.collective == "all_reduce" and len(m.ranks) == world_size)


def largest_bytes(
    links: tuple[LinkMeasurement, ...], world_size: int, between: tuple[int, int], seconds: float
) -> int:
    """The largest size in bytes at which an all_reduce between all ranks ends in time."""
    least, most = between
    size = most
    while size > 4 * least and all_reduce_curve(links, world_size).at(size) > seconds:
        size //= 2
    return size


def piece_of_work(device: torch.device) -> Callable[[], object]:
    side = SIDE if device.type == "cpu" else 16 * SIDE
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)

    def work() -> None:
        torch.mm(a, b).add_(a)
        synchronize(device)

    return work


def per_second(work: Callable[[], object], is_over: Callable[[], bool]) -> float:
    """The number of times per second that ``work`` runs until the time is over; 0 if it is over
    immediately."""
    started, count = time.perf_counter(), 0
    while not is_over():
        work()
        count += 1
    return count / (time.perf_counter() - started)


def line(sizes_bytes: tuple[int, int], seconds: tuple[float, float]) -> tuple[float, float]:
    """The line ``(fixed, per_byte)`` through the seconds at two sizes."""
    (few, many), (small, large) = sizes_bytes, seconds
    per_byte = max(large - small, 0.0) / (many - few)
    return max(small - per_byte * few, 0.0), per_byte


def bucket_s(channel: Channel, size_bytes: int) -> float:
    """Seconds that the host of a GPU takes to issue the sum of a bucket of gradients and to receive it."""
    flat = torch.zeros(size_bytes // 4, device=channel.comm.device)

    def once() -> float:
        started = time.perf_counter()
        handle = collectives.all_reduce.start(channel, flat, in_place=True)
        issued = time.perf_counter() - started
        while not handle.is_ready():
            time.sleep(1e-4)
        started = time.perf_counter()
        handle.wait()
        return issued + time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(REPEATS))


def redistribution_s(comm: Comm) -> float:
    """CPU seconds of the computing thread for a redistribution between all ranks, forward or backward, that
    are not those of its collective: autograd's nodes and what finds the collective."""
    channel, rows = comm.channel(comm.everyone, "profile of redistributions"), (1,) * comm.world_size
    shape = len(rows), PIECE_BYTES[0] // 4
    cut, whole = Layout(Shard(0), comm.everyone, rows), Layout(REPLICATE, comm.everyone)
    how = between(comm, channel.what, shape, torch.float32, cut, whole)
    zeros = partial(torch.zeros, dtype=torch.float32, device=comm.device)
    pieces = [zeros(1, shape[1], requires_grad=True) for _ in range(REDISTRIBUTIONS)]
    full, token = zeros(shape), zeros(0)

    def differentiable() -> None:
        tokens: list[torch.Tensor] = []
        results = [y for y in (how.apply(piece, tokens) for piece in pieces) if y is not None]
        gradients = [full] * len(results) + [token] * len(tokens)
        torch.autograd.grad((*results, *tokens), pieces, gradients)

    def plain() -> None:
        for piece in pieces:
            collectives.all_gather(channel, piece.detach(), rows)
        for _ in pieces:
            collectives.reduce_scatter(channel, full, rows)

    once = Meter(comm.device, emulated=True).once  # reads CPU time
    # the first one warms up; within whatever context of the caller's script
    with torch.enable_grad():
        differences = [once(differentiable) - once(plain) for _ in range(1 + REPEATS)][1:]
    return max(statistics.median(differences) / (2 * REDISTRIBUTIONS), 0.0)


def everyone_cases(comm: Comm) -> list[Case]:
    """The cases that move data between all ranks, by every algorithm; the most usual ones first."""
    even = (1.0,) * comm.world_size
    ways = [("all_reduce", "")]
    ways += [(name, default_algorithm(name, backend_of())) for name in ALGORITHMS]
    ways += [("all_to_all", ""), ("broadcast", ""), ("reduce", "")]
    ways += [(name, algorithm) for name, algorithms in ALGORITHMS.items() for algorithm in algorithms]
    return [Case(name, algorithm, comm.everyone, even, EVEN) for name, algorithm in dict.fromkeys(ways)]


def exchange_s(comm: Comm, channel: Channel, case: Case, size_bytes: int) -> tuple[float, float]:
    """CPU seconds of the computing thread in a collective that it waits for, and of the others."""
    run = prepared(comm, channel, case, rows_of(size_bytes))

    def once() -> tuple[float, float]:
        started, of_all = time.thread_time(), time.process_time()
        run()
        own, of_all = time.thread_time() - started, time.process_time() - of_all
        return own, max(of_all - own, 0.0)

    once()
    own_s, others_s = zip(*(once() for _ in range(REPEATS)))
    # the time of other threads is a difference of two clocks, and never negative
    return statistics.median(own_s), min(others_s)
