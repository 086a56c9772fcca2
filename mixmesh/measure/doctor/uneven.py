"""Checks that collectives of uneven pieces are right on these devices: every algorithm that training may use,
on tensors of the device, with some pieces empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import CollectiveError
from ...runtime import collectives
from ...runtime.comm import Comm
from .ground import Ground, count

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
COLUMNS = 5
WIDE = 2**16  # columns so wide that gloo exchanges the pieces by sends between pairs
Case = tuple[str, Callable[[], Tensor], Tensor]  # (name, collective, expected result)


def uneven(ground: Ground) -> str:
    """Checks gathers, scattered sums, exchanges, broadcasts and sends whose pieces have a different size on
    every rank."""

    def make() -> list:
        world_size = ground.meeting.world_size
        comm = Comm.of_sets(world_size, (), device=ground.device, timeout_s=ground.group_timeout_s)
        wrong, number = [], 0
        for name, run, expected in cases(comm):
            number += 1
            got = run()
            # no rank stops here, as the others would wait for it in the next case
            if got.device != expected.device or not torch.equal(got, expected):
                wrong.append([name, text_of(expected), text_of(got)])
        comm.close()
        return [number, wrong]

    told = ground.meeting.gather_together("collectives of uneven pieces", make)
    failed = {rank: wrong for rank, (_, wrong) in enumerate(told) if wrong}
    if failed:
        rank = min(failed)
        name, expected, got = failed[rank][0]
        raise CollectiveError(
            f"{name} is wrong on rank {rank}, and {sum(map(len, failed.values())) - 1} more",
            expected=expected,
            got=got,
            hint=(
                "another version of PyTorch (and NCCL); with GPUs NCCL_P2P_DISABLE=1, then again",
                "NCCL_ALGO=Ring NCCL_PROTO=Simple, then again: right with it tells that a protocol is broken",
            ),
            ranks=tuple(failed),
        )
    return f"{count(told[0][0], 'case')} right on {ground.device.type} tensors by {ground.backend}"


def cases(comm: Comm) -> Iterator[Case]:
    """All cases, in the same order on all ranks."""
    for sizes in sizes_of(comm.world_size):
        for dtype in DTYPES:
            yield from gathers(comm, sizes, dtype)
            yield from sums(comm, sizes, dtype)
    yield from exchanges(comm)
    yield from sends(comm)


def sizes_of(world_size: int) -> tuple[list[int], ...]:
    """The number of rows of each rank: more on each next rank, and none on the first."""
    return [rank + 1 for rank in range(world_size)], [3 * rank for rank in range(world_size - 1)] + [4]


def numbers(comm: Comm, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers, the same on all ranks, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (rows, columns), generator=generator).to(comm.device, dtype)


def gathers(comm: Comm, sizes: list[int], dtype: torch.dtype) -> Iterator[Case]:
    channel = comm.channel(comm.everyone, "all_gather")
    for columns in (COLUMNS, WIDE) if dtype == torch.float32 else (COLUMNS,):
        whole = numbers(comm, sum(sizes), columns, dtype)
        mine = whole.split(sizes)[comm.rank]
        for algorithm in collectives.ALL_GATHER:
            name = f"all_gather by {algorithm} of {dtype}, rows {sizes}"
            yield (
                name,
                partial(collectives.all_gather, channel, mine, sizes, algorithm=algorithm),
                whole,
            )


def sums(comm: Comm, sizes: list[int], dtype: torch.dtype) -> Iterator[Case]:
    addends = [numbers(comm, sum(sizes), COLUMNS, dtype, rank) for rank in comm.everyone]
    total = sum(addends[1:], addends[0])
    mine, piece = addends[comm.rank], total.split(sizes)[comm.rank]
    channel = comm.channel(comm.everyone, "reduce_scatter")
    for algorithm in collectives.REDUCE_SCATTER:
        name = f"reduce_scatter by {algorithm} of {dtype}, rows {sizes}"
        yield name, partial(collectives.reduce_scatter, channel, mine, sizes, algorithm=algorithm), piece
    yield f"all_reduce of {dtype}", lambda: collectives.all_reduce(channel, mine), total
    last = comm.world_size - 1
    expected = total if comm.rank == last else mine
    reduced = lambda: collectives.reduce(channel, mine, last)  # noqa: E731
    yield f"reduce of {dtype}", lambda: reduced() if comm.rank == last else (reduced(), mine)[1], expected
    yield f"broadcast of {dtype}", lambda: collectives.broadcast(channel, mine.clone(), last), addends[last]


def exchanges(comm: Comm) -> Iterator[Case]:
    channel = comm.channel(comm.everyone, "all_to_all")
    one, other = sizes_of(comm.world_size)
    other = [*other[:-1], other[-1] + sum(one) - sum(other)] if sum(other) <= sum(one) else one[::-1]
    for columns in (COLUMNS, WIDE):
        whole = numbers(comm, sum(one), columns, torch.float32)
        mine = whole.split(one)[comm.rank]
        moved = lambda x=mine: collectives.all_to_all(channel, x, 0, one, 0, other)  # noqa: E731
        yield f"all_to_all from rows {one} to {other}", moved, whole.split(other)[comm.rank]
    across = numbers(comm, sum(one), sum(other), torch.float32)
    mine, expected = across.split(one)[comm.rank], across.split(other, 1)[comm.rank]
    turned = lambda: collectives.all_to_all(channel, mine, 0, one, 1, other)  # noqa: E731
    yield f"all_to_all from rows {one} to columns {other}", turned, expected


def sends(comm: Comm) -> Iterator[Case]:
    """Sends around the ring; each next rank sends more rows."""
    if comm.world_size == 1:
        return
    before, after = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
    channel = comm.channel(comm.everyone, "send")
    where = torch.device("cpu") if channel.staged else comm.device

    def run() -> Tensor:
        sent = numbers(comm, comm.rank + 1, COLUMNS, torch.float32, comm.rank).to(where)
        received = torch.empty(before + 1, COLUMNS, device=where)
        # in one call: NCCL's sends and receives wait for each other unless they form one group
        pairs = [
            dist.P2POp(dist.irecv, received, before, channel.group),
            dist.P2POp(dist.isend, sent, after, channel.group),
        ]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        return received.to(comm.device)

    yield "send and receive", run, numbers(comm, before + 1, COLUMNS, torch.float32, before)


def text_of(value: Tensor) -> str:
    """Describes a tensor by its form and first numbers."""
    first = ", ".join(f"{x:g}" for x in value.flatten()[:4].tolist())
    return f"{list(value.shape)} on {value.device.type}: {first}, ..."
