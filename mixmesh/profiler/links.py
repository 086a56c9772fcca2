"""Times of collectives between all ranks, on pieces of unequal size."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from ..cost import CollectiveFit, Curve
from ..ir import make_ratio, shard_sizes
from ..runtime import collectives
from ..runtime.comm import Comm
from .meter import REPEATS, Meter

COLLECTIVE_BYTES = (2**12, 2**18, 2**22, 2**24)


MEASURED_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def fit_collective(comm: Comm, name: str, budget_s: float) -> CollectiveFit:
    """Latency and seconds per byte of the whole tensor, over all ranks, unequal pieces where they occur."""
    if comm.world_size < 2:
        return CollectiveFit(0.0, 0.0)
    points: list[tuple[float, float]] = []
    channel = comm.channel(comm.everyone, f"profile of {name}")
    n = comm.world_size
    started = time.perf_counter()
    for size_bytes in COLLECTIVE_BYTES:
        rows = max(n, size_bytes // 4 // 16)
        shares = [2.0 if r % 2 == 0 else 1.0 for r in range(n)]
        sizes = split(rows, shares)
        run = collective_call(name, channel, comm, rows, sizes)
        run()
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            times.append(Meter.wall(run))
        worst = torch.tensor(times, dtype=torch.float64, device=comm.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        points.append((rows * 16 * 4, statistics.median(worst.tolist())))
        over = torch.tensor(time.perf_counter() - started > budget_s, dtype=torch.int32, device=comm.device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over:
            break
    latency, slope = Curve(tuple(points)).affine
    return CollectiveFit(latency, slope)


def split(rows: int, shares: list[float]) -> tuple[int, ...]:
    return shard_sizes(rows, make_ratio(shares))


def collective_call(name: str, channel, comm: Comm, rows: int, sizes: tuple[int, ...]):
    mine = sizes[comm.rank]
    whole = torch.ones(rows, 16, device=comm.device)
    piece = whole[:mine].clone()
    match name:
        case "all_reduce":
            return lambda: collectives.all_reduce(channel, whole)
        case "all_gather":
            return lambda: collectives.all_gather(channel, piece, sizes)
        case "reduce_scatter":
            return lambda: collectives.reduce_scatter(channel, whole, sizes)
        case "all_to_all":
            columns = split(16, [1.0] * comm.world_size)
            return lambda: collectives.all_to_all(channel, piece, 0, sizes, 1, columns)
    raise ValueError(name)
