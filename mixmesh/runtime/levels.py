"""Hierarchical collectives: to one rank of each machine, between those, and back (``ir.levels``).

The stages of one collective follow each other, while those of several collectives overlap: every stage has
its own process group and its own thread, which takes collectives in the order of their issue. That order is
the same on all ranks, so no two ranks wait for each other in different ones. On NCCL, streams take the place
of the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from ..cost.communicators import BETWEEN, DOWN, UP
from ..lang.ir import Parts, leaders
from .accelerator import is_on_device
from .comm import Comm
from .streams import Moment, await_moment, issue_beside
from .works import StagedWork, queue_of

STAGES = 3  # the most stages that a collective has: up, between, down
Stage = Callable[[], Sequence[dist.Work]]  # starts the transfers of a stage


class ByLevels:
    """Hierarchical collectives of a bucket, each called like a function of ``torch.distributed``. If pieces
    have owners, these are leaders, the ranks that represent their machines."""

    def __init__(self, comm: Comm, parts: Parts) -> None:
        mine = next(part for part in parts if comm.rank in part)
        self.leaders, self.leader = leaders(parts), mine[0]
        self.leads, self.device = comm.rank == mine[0], comm.device
        several = len(mine) > 1
        self.up_group = comm.groups[UP, mine] if several else None
        self.down_group = comm.groups[DOWN, mine] if several else None
        self.between = comm.groups[BETWEEN, self.leaders]

    def all_reduce(self, x: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup, async_op: bool):
        """Sums ``x`` in place. ``group`` is the group of the flat sum, which determines the backend."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"levels sum, and do not {op}")

        def between() -> Sequence[dist.Work]:
            return [dist.all_reduce(x, group=self.between, async_op=True)] if self.leads else ()

        return self._start(x, (lambda: self._up(x), between, lambda: self._down(x)), group)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], group: dist.ProcessGroup, async_op: bool):
        """Sums ``x``, and leaves in it each leader's piece of the sum. ``counts`` are per rank of
        ``group``."""

        def between() -> Sequence[dist.Work]:
            reduce = dist.reduce
            return [
                reduce(p, r, group=self.between, async_op=True) for r, p in self._pieces(x, counts, group)
            ]

        return self._start(x, (lambda: self._up(x), between), group)

    def all_gather(self, x: Tensor, counts: Sequence[int], group: dist.ProcessGroup, async_op: bool):
        """Fills ``x``, in which every leader has its own piece, with all pieces."""

        def between() -> Sequence[dist.Work]:
            pieces = self._pieces(x, counts, group)
            return [dist.broadcast(piece, r, group=self.between, async_op=True) for r, piece in pieces]

        return self._start(x, (lambda: (), between, lambda: self._down(x)), group)

    def _pieces(self, x: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> list[tuple[int, Tensor]]:
        """The leaders with their pieces; empty if this rank is no leader."""
        ranks = dist.get_process_group_ranks(group) if self.leads else ()
        return [(r, piece) for r, piece in zip(ranks, x.split(list(counts))) if piece.numel()]

    def _up(self, x: Tensor) -> Sequence[dist.Work]:
        if self.up_group is None:
            return ()
        return [dist.reduce(x, self.leader, group=self.up_group, async_op=True)]

    def _down(self, x: Tensor) -> Sequence[dist.Work]:
        if self.down_group is None:
            return ()
        return [dist.broadcast(x, self.leader, group=self.down_group, async_op=True)]

    def _start(self, x: Tensor, stages: Sequence[Stage], group: dist.ProcessGroup) -> StagedWork | StreamWork:
        if is_on_device(group):
            return StreamWork.of(x, stages, self.device)
        work = StagedWork(stages)
        _first_stage().put(work)
        return work


@cache
def _first_stage() -> SimpleQueue:
    """The queue of the first stage's thread, which passes work on to the next stage's thread, and so on."""
    following = queue_of(1, f"level {STAGES - 1}", partial(_serve, STAGES - 1, None))
    for stage in reversed(range(STAGES - 1)):
        following = queue_of(1, f"level {stage}", partial(_serve, stage, following))
    return following


def _serve(stage: int, following: SimpleQueue | None, work: StagedWork) -> None:
    work.advance(stage)
    if following is not None:
        following.put(work)


@dataclass(frozen=True)
class StreamWork:
    """A sum under way on a stream of a GPU."""

    device: torch.device
    end: Moment
    last: dist.Work | None

    @classmethod
    def of(cls, x: Tensor, stages: Sequence[Stage], device: torch.device) -> StreamWork:
        works: list[dist.Work] = []

        def issue() -> None:
            for start in stages:
                for work in start():
                    work.wait()  # blocks the stream, not the host
                    works.append(work)

        end = issue_beside(device, x, issue)
        return cls(device, end, works[-1] if works else None)

    def wait(self) -> None:
        await_moment(self.device, self.end)

    def is_completed(self) -> bool:
        return self.end.query()

    def get_future(self) -> torch.futures.Future:
        """The future of the last transfer; a completed one if this rank had nothing to move."""
        if self.last is not None:
            return self.last.get_future()
        over: torch.futures.Future = torch.futures.Future()
        over.set_result(None)
        return over
