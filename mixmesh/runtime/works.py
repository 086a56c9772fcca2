"""Collectives of several parts, each as a ``torch.distributed.Work``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

Stage = Callable[[], Sequence[dist.Work]]

WATCHING = 4  # exchanges that threads wait for at once: more are under way, and told of later


class StagedWork:
    """Stages that follow each other, each begun when all of the one before has ended."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages, self.done = stages, torch.futures.Future()
        self.over = threading.Event()  # set when what was to happen at the end has happened too
        # its text: an error itself remembers all that was going on where it was raised
        self.error: str | None = None

    def advance(self, stage: int) -> None:
        """A failure is told to who waits; later stages are left out, and time out elsewhere."""
        is_last = stage == len(self.stages) - 1
        if self.error is None and stage < len(self.stages):
            try:
                self._do(stage)
            except Exception as error:
                self.error = str(error)
        if not is_last:
            return
        self.stages = ()  # with the tensors: who waits may hold on to a work for longer
        try:
            if self.error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(RuntimeError(self.error))
        finally:
            self.over.set()

    def _do(self, stage: int) -> None:
        for work in self.stages[stage]():
            work.wait()

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.over.is_set()

    def get_future(self) -> torch.futures.Future:
        return self.done


class PairwiseWork:
    """Sends and receives under way. Who waits for them does so itself, and nobody else runs meanwhile: a
    thread would take the interpreter from who computes. gloo says only to who waits that something has come,
    so that who asks, or wants to be told, has a thread wait from then on."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works, self.watched = works, None

    def wait(self) -> None:
        if self.watched is not None:
            self.watched.wait()
        works, self.works = self.works, ()
        for work in works:
            work.wait()

    def is_completed(self) -> bool:
        return self._watched().is_completed()

    def get_future(self) -> torch.futures.Future:
        return self._watched().get_future()

    def _watched(self) -> StagedWork:
        if self.watched is None:
            works, self.works = self.works, ()
            self.watched = StagedWork([lambda: works])
            if works:
                _watching().put(self.watched)
            else:
                self.watched.advance(0)
        return self.watched

    def __del__(self) -> None:
        """gloo forgets a receive that nobody holds, and then reads no further from that peer."""
        if self.works and not sys.is_finalizing():
            self._watched()


def pairwise(
    received: Sequence[Tensor], sent: Sequence[Tensor], *, group: dist.ProcessGroup, async_op: bool
) -> PairwiseWork:
    """Between every two ranks of a gloo group, ``sent[j]`` goes to rank j of it and ``received[j]`` comes
    from there; what is empty does not. Sizes may all differ."""
    me = dist.get_rank(group)
    received[me].copy_(sent[me])
    return PairwiseWork(_posted(received, sent, group, _next_tag(group)))


def _posted(
    received: Sequence[Tensor], sent: Sequence[Tensor], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """All that is to be received is said before anything is sent. gloo says so over the connection that it
    sends over, so that a rank that sends first says it when its megabytes are gone. Where both do, the one
    waits for the other, and of the two ways of a link only one is in use (gloo's own all_to_all and
    broadcasts take up to twice as long for it, as threads happen to run)."""
    me, count = dist.get_rank(group), len(sent)
    others = range(1, count)
    sources = [j for j in ((me - k) % count for k in others) if received[j].numel()]
    targets = [j for j in ((me + k) % count for k in others) if sent[j].numel()]
    works = [dist.irecv(received[j], group=group, group_src=j, tag=tag) for j in sources]
    return works + [dist.isend(sent[j], group=group, group_dst=j, tag=tag) for j in targets]


_tags: dict[str, int] = {}


def _next_tag(group: dist.ProcessGroup) -> int:
    """Tells the parts of one exchange from those of others of the group, which all ranks begin in one
    order."""
    tag = _tags[group.group_name] = (_tags.get(group.group_name, 0) + 1) % 2**30
    return tag


@cache
def _watching() -> SimpleQueue:
    return queue_of(WATCHING, "watches", lambda work: work.advance(0))


def queue_of(threads: int, name: str, serve: Callable[[StagedWork], None]) -> SimpleQueue:
    """A queue of works that so many threads ``serve``, each the next one. They end with the process."""
    queue: SimpleQueue = SimpleQueue()

    def run() -> None:
        while True:
            work = queue.get()
            serve(work)
            del work  # and who waited for it, if it failed: not remembered until the next one comes

    for n in range(threads):
        threading.Thread(target=run, name=f"mixmesh {name} {n}", daemon=True).start()
    return queue
