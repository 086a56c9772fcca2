"""Collectives on pieces of unequal size, each with several named algorithms. No autograd here.

All data is in flat buffers in rank order. Copies are sent as bytes, so that every dtype works; addends are
sent as numbers. A piece of size zero is legal everywhere and is never sent.

The best algorithm depends on sizes and links, so an instruction can name one (attribute ``algorithm``);
otherwise ``cost.default_algorithm`` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from functools import reduce as reduce_pairs
from typing import Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..cost import default_algorithm
from ..errors import InputError
from .accelerator import is_accelerator
from .comm import Channel
from .levels import ByLevels
from .works import pairwise

Sizes = Sequence[int]
T = TypeVar("T")
P = ParamSpec("P")
# PyTorch 2.13's names for two collectives, and the older ones
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# fewer bytes are sent without anyone waiting: gloo's own all_to_all then has less to do
PAIRWISE_BYTES = 2**17


class Handle(Generic[T]):
    """A collective under way. ``wait`` may be called more than once."""

    _result: T  # set once ``_finish`` is None

    def __init__(self, channel: Channel | None, works: Sequence, finish: Callable[[], T]) -> None:
        self._channel, self._works = channel, works
        self._finish: Callable[[], T] | None = finish

    def is_ready(self) -> bool:
        """True if ``wait`` returns at once; may be False for a handle that is ready."""
        return self._finish is None or (bool(self._works) and all(w.is_completed() for w in self._works))

    def wait(self) -> T:
        if self._finish is not None:
            if self._channel is not None:
                for work in self._works:
                    self._channel.finish(work)
            self._result = self._finish()
            self._works, self._finish = (), None
        return self._result


def done(result: T) -> Handle[T]:
    return Handle(None, (), lambda: result)


class _Then(Handle[T]):
    def __init__(self, handles: Sequence[Handle], f: Callable[..., T]) -> None:
        super().__init__(None, (), lambda: f(*(handle.wait() for handle in handles)))
        self._handles = handles

    def is_ready(self) -> bool:
        return all(handle.is_ready() for handle in self._handles)


def then(f: Callable[..., T], *handles: Handle) -> Handle[T]:
    """A handle on ``f`` of the results of others."""
    return _Then(handles, f)


class Collective(Generic[P]):
    """A collective: calling it waits for the result, and ``start`` returns a handle."""

    def __init__(self, start: Callable[P, Handle[Tensor]]) -> None:
        self.start = start
        update_wrapper(self, start)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return self.start(*args, **kwargs).wait()


# --- all_gather ---------------------------------------------------------------------------------------
#
# An algorithm maps (channel, my bytes, bytes per rank) to (works, function that gives all bytes).


def _gather_broadcasts(channel: Channel, mine: Tensor, counts: Sizes):
    full = mine.new_empty(sum(counts))
    pieces = full.split(list(counts))
    pieces[channel.me].copy_(mine)
    works = [
        channel.start(dist.broadcast, piece, src=rank)
        for rank, piece in zip(channel.ranks, pieces)
        if piece.numel()
    ]
    return works, lambda: full


def _gather_padded(channel: Channel, mine: Tensor, counts: Sizes):
    longest = max(counts)
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
    full = mine.new_empty(longest * len(counts))
    works = [channel.start(_all_gather_single, full, padded)]
    rows = full.view(len(counts), longest)
    return works, lambda: torch.cat([row[:count] for row, count in zip(rows, counts)])


def _gather_all_to_all(channel: Channel, mine: Tensor, counts: Sizes):
    full = mine.new_empty(sum(counts))
    if _is_pairwise(channel, sum(counts)):
        return [channel.start(pairwise, full.split(list(counts)), [mine] * len(counts))], lambda: full
    sent = mine.repeat(len(counts))
    splits = [mine.numel()] * len(counts)
    works = [channel.start(dist.all_to_all_single, full, sent, list(counts), splits)]
    return works, lambda: (sent, full)[1]  # the sent buffer must live as long as the work


def _gather_by_levels(levels: ByLevels, channel: Channel, mine: Tensor, counts: Sizes):
    full = mine.new_empty(sum(counts))
    full.split(list(counts))[channel.me].copy_(mine)
    return [channel.start(levels.all_gather, full, counts)], lambda: full


ALL_GATHER = {
    "broadcasts": _gather_broadcasts,
    "padded": _gather_padded,
    "all_to_all": _gather_all_to_all,
}


@Collective
def all_gather(
    channel: Channel,
    x: Tensor,
    sizes: Sizes,
    dim: int = 0,
    *,
    algorithm: str | None = None,
    levels: ByLevels | None = None,
) -> Handle[Tensor]:
    """Concatenates the pieces of all ranks of the channel along ``dim``. ``sizes`` are per rank. With
    ``levels`` only leaders have pieces."""
    if channel.alone or sum(sizes) == 0:
        return done(x)
    shapes = [_resize(x.shape, dim, size) for size in sizes]
    counts = [math.prod(shape) for shape in shapes]
    width = x.element_size()
    if levels is not None:
        run = partial(_gather_by_levels, levels)
    else:
        run = _pick(ALL_GATHER, algorithm, channel, counts, "all_gather")
    works, full = run(channel, flat_bytes(_stage(channel, x)), [count * width for count in counts])

    def finish() -> Tensor:
        flat = _unstage(channel, full().view(x.dtype))
        if math.prod(shapes[0][:dim]) == 1:  # rank order is memory order
            return flat.view(_resize(x.shape, dim, sum(sizes)))
        return torch.cat([p.view(shape) for p, shape in zip(flat.split(counts), shapes)], dim)

    return Handle(channel, works, finish)


# --- reduce_scatter -----------------------------------------------------------------------------------
#
# An algorithm maps (channel, addends in rank order, elements per rank) to (works, function that gives my
# piece). The buffer is its own to overwrite, but for those that only read it.


def _scatter_reduces(channel: Channel, flat: Tensor, counts: Sizes):
    pieces = flat.split(list(counts))
    works = [
        channel.start(dist.reduce, piece, dst=rank)
        for rank, piece in zip(channel.ranks, pieces)
        if piece.numel()
    ]
    return works, lambda: pieces[channel.me].clone()  # so that the other pieces can be freed


def _scatter_list(channel: Channel, flat: Tensor, counts: Sizes):
    pieces = list(flat.split(list(counts)))
    mine = flat.new_empty(counts[channel.me])
    works = [channel.start(dist.reduce_scatter, mine, pieces)]
    return works, lambda: (pieces, mine)[1]


def _scatter_padded(channel: Channel, flat: Tensor, counts: Sizes):
    longest = max(counts)
    rows = flat.new_zeros(len(counts), longest)
    for row, piece in zip(rows, flat.split(list(counts))):
        row[: piece.numel()] = piece
    mine = flat.new_empty(longest)
    works = [channel.start(_reduce_scatter_single, mine, rows.view(-1))]
    return works, lambda: (rows, mine)[1][: counts[channel.me]].clone()


def _scatter_all_reduce(channel: Channel, flat: Tensor, counts: Sizes):
    works = [channel.start(dist.all_reduce, flat)]
    return works, lambda: flat.split(list(counts))[channel.me].clone()


def _scatter_all_to_all(channel: Channel, flat: Tensor, counts: Sizes):
    count, world_size = counts[channel.me], len(counts)
    addends = flat.new_empty(world_size, count)
    splits = [count] * world_size
    works = [channel.start(dist.all_to_all_single, addends.view(-1), flat, splits, list(counts))]
    return works, lambda: (flat, addends)[1].sum(0)


def _scatter_by_levels(levels: ByLevels, channel: Channel, flat: Tensor, counts: Sizes):
    works = [channel.start(levels.reduce_scatter, flat, counts)]
    return works, lambda: flat.split(list(counts))[channel.me].clone()


REDUCE_SCATTER = {
    "reduces": _scatter_reduces,
    "list": _scatter_list,
    "padded": _scatter_padded,
    "all_reduce": _scatter_all_reduce,
    "all_to_all": _scatter_all_to_all,
}
ONLY_READ = (_scatter_padded, _scatter_all_to_all)


@Collective
def reduce_scatter(
    channel: Channel,
    x: Tensor,
    sizes: Sizes,
    dim: int = 0,
    *,
    algorithm: str | None = None,
    levels: ByLevels | None = None,
    in_place: bool = False,
) -> Handle[Tensor]:
    """Sums ``x`` over all ranks and returns this rank's piece along ``dim``. ``x`` must not change until the
    handle is waited for; ``in_place`` may overwrite it. With ``levels`` only leaders get pieces."""
    mine = _resize(x.shape, dim, sizes[channel.me])
    if channel.alone or x.numel() == 0:
        return done(x)
    counts = [math.prod(_resize(x.shape, dim, size)) for size in sizes]
    if levels is not None:
        run = partial(_scatter_by_levels, levels)
    else:
        run = _pick(REDUCE_SCATTER, algorithm, channel, counts, "reduce_scatter")
    moved = _summable(channel, _stage(channel, x))
    if math.prod(x.shape[:dim]) == 1:
        flat = flatten(moved)
        is_mine = in_place or run in ONLY_READ or flat.data_ptr() != x.data_ptr()
        flat = flat if is_mine else flat.clone()
    else:
        flat = torch.cat([piece.reshape(-1) for piece in moved.split(list(sizes), dim)])
    works, piece = run(channel, flat, counts)
    finish = lambda: _unstage(channel, piece()).to(x.dtype).view(mine)  # noqa: E731
    return Handle(channel, works, finish)


# --- all_reduce, all_to_all, broadcast, reduce --------------------------------------------------------

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
TWO_BY_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


@Collective
def all_reduce(
    channel: Channel,
    x: Tensor,
    op: str = "sum",
    *,
    levels: ByLevels | None = None,
    direct: bool = False,
    in_place: bool = False,
) -> Handle[Tensor]:
    """Reduces ``x`` over ranks (sum, max, min or prod), hierarchically with ``levels``. If ``direct``, every
    rank sends ``x`` to every other one. ``in_place`` may overwrite ``x``, which must be contiguous."""
    if channel.alone or x.numel() == 0:
        return done(x)
    if direct:
        handle = _all_reduce_directly(channel, x, op)
        return then(x.copy_, handle) if in_place else handle
    buffer = _summable(channel, _stage(channel, x)).contiguous()
    if not in_place and buffer.data_ptr() == x.data_ptr():
        buffer = buffer.clone()
    call = dist.all_reduce if levels is None else levels.all_reduce
    works = [channel.start(call, buffer, op=REDUCE_OPS[op])]

    def finish() -> Tensor:
        result = _unstage(channel, buffer).to(x.dtype)
        if in_place and result.data_ptr() != x.data_ptr():
            return x.copy_(result)
        return result

    return Handle(channel, works, finish)


def _all_reduce_directly(channel: Channel, x: Tensor, op: str) -> Handle:
    """Sums in one hop, instead of two for every level of a tree or for every rank of a ring. All ranks add in
    rank order, so that all get the same result to the last bit."""
    n = len(channel.ranks)
    size_bytes = n * n * x.numel() * x.element_size()

    def added(addends: list[Tensor]) -> Tensor:
        if op == "sum" and is_accelerator(addends[0].device):  # a single kernel, which also adds in order
            return torch.stack(addends).sum(0, dtype=x.dtype)
        return reduce_pairs(TWO_BY_TWO[op], addends)

    return then(added, exchange(channel, [x] * n, [tuple(x.shape)] * n, size_bytes))


def exchange(
    channel: Channel,
    sent: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    size_bytes: int,
) -> Handle[list[Tensor]]:
    """Sends ``sent[j]`` to the j-th rank of the channel, and returns the tensors, of these ``shapes``, that
    each of them sent here. ``size_bytes`` is the total over all ranks, which all of them know."""
    dtype, width = sent[0].dtype, sent[0].element_size()
    flat = _stage(channel, torch.cat([piece.reshape(-1) for piece in sent]))
    counts = [math.prod(shape) for shape in shapes]
    received = torch.empty(sum(counts), dtype=dtype, device=flat.device)
    bytes_in = [piece.numel() * width for piece in sent]
    bytes_out = [count * width for count in counts]
    works = []
    if channel.alone:
        received = flat
    elif _is_pairwise(channel, size_bytes):
        pieces = flat_bytes(received).split(bytes_out), flat_bytes(flat).split(bytes_in)
        works = [channel.start(pairwise, *pieces)]
    else:
        works = [
            channel.start(dist.all_to_all_single, flat_bytes(received), flat_bytes(flat), bytes_out, bytes_in)
        ]

    def finish() -> list[Tensor]:
        pieces = _unstage(channel, (flat, received)[1]).split(counts)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    return Handle(channel, works, finish)


@Collective
def all_to_all(
    channel: Channel,
    x: Tensor,
    src_dim: int,
    src_sizes: Sizes,
    dst_dim: int,
    dst_sizes: Sizes,
) -> Handle[Tensor]:
    """Turns pieces along ``src_dim`` into pieces along ``dst_dim``, both cut unequally.

    With ``src_dim == dst_dim`` it moves the borders between the ranks (a change of ratio).
    """
    me, n = channel.me, len(channel.ranks)
    if src_dim != dst_dim:
        sent = x.split(list(dst_sizes), dst_dim)
        mine = _resize(x.shape, dst_dim, dst_sizes[me])
        shapes = [_resize(mine, src_dim, size) for size in src_sizes]
    else:
        src, dst = _intervals(src_sizes), _intervals(dst_sizes)
        cuts = [_overlap(src[me], dst[j]) for j in range(n)]
        sent = [x.narrow(src_dim, max(a - src[me][0], 0) if b > a else 0, b - a) for a, b in cuts]
        takes = [_overlap(src[i], dst[me]) for i in range(n)]
        shapes = [_resize(x.shape, src_dim, b - a) for a, b in takes]
    whole = _resize(x.shape, src_dim, sum(src_sizes))
    handle = exchange(channel, sent, shapes, math.prod(whole) * x.element_size())
    return then(lambda pieces: torch.cat(pieces, src_dim), handle)


@Collective
def broadcast(channel: Channel, x: Tensor, src: int) -> Handle[Tensor]:
    """The tensor ``x`` of rank ``src`` (a rank of the world) on every rank of the channel; on the others it
    is written into ``x``."""
    if channel.alone or x.numel() == 0:
        return done(x)
    flat = _stage(channel, x.contiguous())
    works = [channel.start(dist.broadcast, flat_bytes(flat), src=src)]

    def finish() -> Tensor:
        if flat.data_ptr() == x.data_ptr():
            return x
        return x if channel.comm.rank == src else x.copy_(flat.view(x.shape))

    return Handle(channel, works, finish)


@Collective
def reduce(channel: Channel, x: Tensor, dst: int) -> Handle[Tensor]:
    """The sum over ranks, on rank ``dst`` of the world; on other ranks the result is meaningless."""
    if channel.alone or x.numel() == 0:
        return done(x)
    buffer = _summable(channel, _stage(channel, x)).contiguous()
    buffer = buffer.clone() if buffer.data_ptr() == x.data_ptr() else buffer
    works = [channel.start(dist.reduce, buffer, dst=dst)]
    return Handle(channel, works, lambda: _unstage(channel, buffer).to(x.dtype))


# --- helpers ------------------------------------------------------------------------------------------


ALIASES = {"grouped": {"all_gather": "broadcasts", "reduce_scatter": "reduces"}}


def _pick(table: dict, algorithm: str | None, channel: Channel, counts: Sizes, what: str):
    if algorithm is None:
        rooted = sum(count > 0 for count in counts) == 1  # a broadcast or a reduce, without padding
        skew = max(counts) * len(counts) / sum(counts)
        algorithm = "grouped" if rooted else default_algorithm(what, channel.backend, skew)
    algorithm = ALIASES.get(algorithm, {}).get(what, algorithm)
    if algorithm not in table:
        raise InputError(
            f"{what} has no algorithm {algorithm!r}", expected=", ".join(table), where=channel.where
        )
    return table[algorithm]


def _is_pairwise(channel: Channel, size_bytes: int) -> bool:
    """Whether ``size_bytes`` of all ranks are exchanged by sends and receives between pairs."""
    return channel.backend == "gloo" and size_bytes >= PAIRWISE_BYTES


def _resize(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def flatten(x: Tensor) -> Tensor:
    """The elements in order, consecutive in memory. Autograd may leave gradients expanded or strided, and a
    tensor of at most one element counts as contiguous whatever its strides."""
    whole = x.contiguous()
    return whole.as_strided((whole.numel(),), (1,))


def flat_bytes(x: Tensor) -> Tensor:
    """Like ``flatten``, but as bytes."""
    return flatten(x).view(torch.uint8)


def _stage(channel: Channel, x: Tensor) -> Tensor:
    return x.cpu() if channel.staged else x


def _unstage(channel: Channel, x: Tensor) -> Tensor:
    return x.to(channel.comm.device) if channel.staged else x


def _summable(channel: Channel, x: Tensor) -> Tensor:
    """Converts a dtype that gloo cannot add to a wider one."""
    if channel.backend == "gloo" and x.dtype in WIDER:
        return x.to(WIDER[x.dtype])
    return x


WIDER = {torch.int16: torch.int32}  # bf16 and f16 are summed without conversion


def _intervals(sizes: Sizes) -> list[tuple[int, int]]:
    out, at = [], 0
    for size in sizes:
        out.append((at, at + size))
        at += size
    return out


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if end > start else (0, 0)
