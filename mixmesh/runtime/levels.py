"""Sums by levels: to a rank of each machine, between these, and back (``ir.levels``).

The three stages of a sum follow each other, those of several sums overlap: every stage has a process group
and a thread of its own, which takes sums in the order in which they were issued. That order is the same on
all ranks, so no two ranks wait for each other in different sums. On NCCL a stream of their own takes the
place of the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from ..ir import Parts, leaders
from .comm import Comm
from .layout import BETWEEN, DOWN, UP


class LevelSum:
    """An all_reduce by levels, called as ``torch.distributed``'s own."""

    def __init__(self, comm: Comm, parts: Parts) -> None:
        mine = next(part for part in parts if comm.rank in part)
        self.leads, self.leader = comm.rank == mine[0], mine[0]
        self.device = comm.device
        several = len(mine) > 1
        self.up = comm.groups[UP, mine] if several else None
        self.down = comm.groups[DOWN, mine] if several else None
        self.between = comm.groups[BETWEEN, leaders(parts)]

    def stages(self, x: Tensor) -> tuple[Callable[[], dist.Work | None], ...]:
        """What begins each stage; it gives None where this rank has no part in it."""
        inside = {"async_op": True}
        up, down, between = self.up, self.down, self.between
        return (
            lambda: None if up is None else dist.reduce(x, self.leader, group=up, **inside),
            lambda: dist.all_reduce(x, group=between, **inside) if self.leads else None,
            lambda: None if down is None else dist.broadcast(x, self.leader, group=down, **inside),
        )

    def __call__(
        self, x: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup, async_op: bool
    ) -> LevelWork | StreamWork:
        """``x`` becomes the sum. ``group`` is that of the flat sum, which says what the backend is."""
        if op != dist.ReduceOp.SUM or not async_op:
            raise ValueError("levels sum, and give something to wait for")
        if dist.get_backend(group) == "nccl":
            return StreamWork.of(x, self.stages(x), self.device)
        work = LevelWork(self.stages(x))
        _threads()[0].put(work)
        return work


class LevelWork:
    """A sum on its way through the threads. As a ``torch.distributed.Work``."""

    def __init__(self, stages: Sequence[Callable[[], dist.Work | None]]) -> None:
        self.stages, self.done = stages, torch.futures.Future()
        self.error: Exception | None = None

    def advance(self, stage: int) -> None:
        """A failure is told to who waits; later stages are left out, and time out elsewhere."""
        if self.error is None:
            try:
                work = self.stages[stage]()
                if work is not None:
                    work.wait()
            except Exception as error:
                self.error = error
        if stage < len(self.stages) - 1:
            return
        if self.error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self.error)

    def wait(self) -> None:
        self.done.wait()

    def is_completed(self) -> bool:
        return self.done.done()

    def get_future(self) -> torch.futures.Future:
        return self.done


@cache
def _threads() -> tuple[SimpleQueue, ...]:
    """The queues of this process's threads, one per stage. They end with the process."""
    queues = tuple(SimpleQueue() for _ in range(3))

    def serve(stage: int) -> None:
        while True:
            work = queues[stage].get()
            work.advance(stage)
            if stage + 1 < len(queues):
                queues[stage + 1].put(work)

    for stage in range(len(queues)):
        threading.Thread(target=serve, args=(stage,), name=f"mixmesh level {stage}", daemon=True).start()
    return queues


@dataclass(frozen=True)
class StreamWork:
    """A sum on its way on a stream of a GPU."""

    device: torch.device
    end: torch.cuda.Event
    last: dist.Work | None

    @classmethod
    def of(cls, x: Tensor, stages: Sequence[Callable], device: torch.device) -> StreamWork:
        stream, last = _stream(device), None
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for start in stages:
                work = start()
                if work is not None:
                    work.wait()  # holds the stream, not the host
                    last = work
            end = torch.cuda.Event()
            end.record(stream)
        x.record_stream(stream)
        return cls(device, end, last)

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.end)

    def is_completed(self) -> bool:
        return self.end.query()

    def get_future(self) -> torch.futures.Future:
        return self.last.get_future()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
