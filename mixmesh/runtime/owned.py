"""Owned parameters (ZeRO-1/2): used whole on every rank, but stepped and stored only as their owners' rows.

The whole parameter is a working copy. This rank's rows of it, in the same memory, are the parameter that
model and optimizer show. Gradients travel as one flat buffer per bucket, ordered by owner, so that one
reduce_scatter brings every owner its rows of all members (``gradients``). After the optimizer's step one
all_gather per bucket brings everybody's rows back, in the order of first use; the next forward pass awaits it
before it uses one of the bucket's parameters.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cost.sums import IN_FLIGHT_BYTES
from ..lang.ir import Parts
from .collectives import Handle, all_gather
from .comm import Channel, Comm
from .layout import Layout
from .levels import ByLevels


@dataclass(frozen=True, eq=False)
class Owned:
    """An owned parameter: ``piece`` is this rank's rows of ``whole``, in the same memory. ``held`` is the
    layout of all pieces, and ``ranks`` have a working copy."""

    name: str
    whole: nn.Parameter
    piece: nn.Parameter
    held: Layout
    ranks: tuple[int, ...]
    stage: int

    @classmethod
    def of(cls, name: str, whole: nn.Parameter, held: Layout, ranks: tuple[int, ...], rank: int, stage: int):
        rows = whole.detach().narrow(0, *held.piece(rank))
        if not torch.ops.aten.is_non_overlapping_and_dense(rows):
            # a fused step walks them in memory order: other ranks' rows must not lie between (``q`` of a QR)
            whole.data = whole.detach().contiguous()
            rows = whole.detach().narrow(0, *held.piece(rank))
        return cls(name, whole, nn.Parameter(rows), held, ranks, stage)

    def count(self, rank: int) -> int:
        """The number of elements that ``rank`` owns."""
        return self.held.sizes[rank] * math.prod(self.whole.shape[1:])

    def rows(self, x: Tensor, rank: int) -> Tensor:
        """A rank's rows of a tensor of the whole shape: a view."""
        return x.narrow(0, *self.held.piece(rank))


Group = Sequence[Owned]


def counts(group: Group, ranks: tuple[int, ...]) -> list[int]:
    """The number of elements of each rank in the buffer of a group."""
    return [sum(o.count(rank) for o in group) for rank in ranks]


def pack(group: Group, wholes: Sequence[Tensor], ranks: tuple[int, ...]) -> Tensor:
    """Joins the whole tensors of a group into one flat buffer, ordered by owner. May be a view of a single
    tensor."""
    if len(group) == 1 and wholes[0].is_contiguous():
        return wholes[0].view(-1)
    return torch.cat([o.rows(x, rank).reshape(-1) for rank in ranks for o, x in zip(group, wholes)])


def cut(group: Group, flat: Tensor, rank: int) -> list[Tensor]:
    """Cuts a rank's part of that buffer into its rows of every member."""
    pieces = flat.split([o.count(rank) for o in group])
    return [p.view(o.held.shape(tuple(o.whole.shape), rank)) for o, p in zip(group, pieces)]


class WholeParams:
    """The working copies of this rank, and the gathers that keep them up to date.

    Every rank starts the gathers in the same order, with about ``IN_FLIGHT_BYTES`` under way at a time.
    """

    def __init__(self, comm: Comm, groups: Sequence[Group], parts: Sequence[Parts]) -> None:
        """Takes in ``parts``, for every group that is gathered hierarchically, the ranks by machine."""
        self._comm = comm
        self._groups = list(groups)
        self._index = {o.name: n for n, group in enumerate(self._groups) for o in group}
        self._channels = [
            comm.channel(group[0].ranks, f"all_gather of parameters ({group[0].name} ...)", "gradient")
            for group in self._groups
        ]
        self._levels = [ByLevels(comm, of) if of else None for of in parts]
        self._stale: deque[int] = deque()  # groups that have not started, in order
        self._flying: dict[int, Handle] = {}

    @contextmanager
    def through(self, channel_of: Callable[[Channel, Group], Channel]):
        """A context in which every gather goes through the channel that ``channel_of`` returns when given the
        gather's own channel and group."""
        before = self._channels
        self._channels = [channel_of(*of) for of in zip(before, self._groups)]
        try:
            yield
        finally:
            self._channels = before

    def changed(self) -> None:
        """Marks all working copies as stale: owners have changed their rows, or are about to."""
        if len(self._stale) == len(self._groups):
            return  # all are already marked
        self.finish()
        self._stale.extend(range(len(self._groups)))

    def start(self, stepped: Collection[Tensor] | None = None) -> None:
        """Starts to gather the stale groups, provided that the optimizer that stepped had all owned
        parameters."""
        if stepped is not None:
            stepped_ids = {id(p) for p in stepped}
            if not all(id(o.piece) in stepped_ids for group in self._groups for o in group):
                return
        while self._stale and self._bytes_under_way() < IN_FLIGHT_BYTES:
            self._start(self._stale.popleft())

    def wait(self, name: str) -> None:
        """Waits until the working copy of parameter ``name`` is up to date."""
        index = self._index[name]
        while index in self._stale:
            if self._bytes_under_way() >= IN_FLIGHT_BYTES:
                self._land(next(iter(self._flying)))
            self._start(self._stale.popleft())
        if index in self._flying:
            self._land(index)
            self.start()

    def finish(self) -> None:
        """Brings all working copies up to date. A rank without samples, which uses none, must call it too:
        others wait for its rows."""
        while self._stale or self._flying:
            self.start()
            self._land(next(iter(self._flying)))

    def _bytes_under_way(self) -> int:
        return sum(o.whole.nbytes for index in self._flying for o in self._groups[index])

    @torch.no_grad()
    def _start(self, index: int) -> None:
        group, channel = self._groups[index], self._channels[index]
        mine = torch.cat([o.piece.reshape(-1) for o in group])
        parts, levels = counts(group, channel.ranks), self._levels[index]
        self._flying[index] = all_gather.start(channel, mine, parts, levels=levels)

    @torch.no_grad()
    def _land(self, index: int) -> None:
        group, ranks = self._groups[index], self._channels[index].ranks
        flat = self._flying.pop(index).wait()
        for rank, part in zip(ranks, flat.split(counts(group, ranks))):
            if rank != self._comm.rank:
                for o, rows in zip(group, cut(group, part, rank)):
                    o.rows(o.whole, rank).copy_(rows)


@dataclass(frozen=True, eq=False)
class Awaited:
    """A working copy in the form that the executor takes: awaited on first use."""

    wholes: WholeParams
    name: str
    whole: nn.Parameter

    def wait(self) -> Tensor:
        self.wholes.wait(self.name)
        return self.whole
