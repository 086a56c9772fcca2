"""Collectives made of several parts, each as a ``torch.distributed.Work``."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Waits(Protocol):
    """A work that can be waited for."""

    def wait(self) -> Any: ...


Stage = Callable[[], Sequence[Waits]]

END_S = 2.0  # seconds that the end of a process waits for exchanges that may never end
# exchanges that threads wait for at the same time; for later ones, callers are told later that they have
# ended
WATCHING = 4


class StagedWork:
    """Stages that run one after the other; each begins when all work of the stage before has ended."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.done: torch.futures.Future[Any] = torch.futures.Future()
        self.over = threading.Event()  # set after the callbacks of the future have run
        # only the text of the error: the exception itself would keep alive the frames that it passed through
        self.error: str | None = None

    def advance(self, stage: int) -> None:
        """Runs a stage. After a failure, which ``wait`` reports, later stages are skipped and time out
        elsewhere."""
        is_last = stage == len(self.stages) - 1
        if self.error is None and stage < len(self.stages):
            try:
                self._do(stage)
            except Exception as error:
                self.error = str(error)
        if not is_last:
            return
        self.stages = ()  # frees the tensors, as a waiting caller may keep the work for longer
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


class Posted:
    """Receives and sends posted by a separate thread, known once it has posted them."""

    def __init__(self, post: Callable[[], Sequence[dist.Work]]) -> None:
        self._post: Callable[[], Sequence[dist.Work]] | None = post
        self._is_over = threading.Event()
        self._works: Sequence[dist.Work] = ()
        self._error: str | None = None

    def post(self) -> None:
        try:
            assert self._post is not None  # it is posted only once
            self._works = self._post()
        except Exception as error:
            self._error = str(error)
        finally:
            self._post = None  # frees the tensors
            self._is_over.set()

    def wait(self) -> None:
        self._is_over.wait()
        if self._error is not None:
            raise RuntimeError(self._error)
        works, self._works = self._works, ()
        for work in works:
            work.wait()


class PairwiseWork:
    """Receives and sends under way. ``wait`` waits in the calling thread. gloo reports arrivals only to a
    waiting thread, so ``is_completed`` and futures start a thread that waits."""

    def __init__(self, posted: Posted) -> None:
        self._posted: Posted | None = posted  # collectives that nothing has waited for yet
        self._watched: StagedWork | None = None

    def wait(self) -> None:
        if self._watched is not None:
            self._watched.wait()
        elif self._posted is not None:
            posted, self._posted = self._posted, None
            posted.wait()

    def is_completed(self) -> bool:
        return self._watch().is_completed()

    def get_future(self) -> torch.futures.Future:
        return self._watch().get_future()

    def __del__(self) -> None:
        """Makes another thread wait: gloo forgets a receive that nobody holds, and then reads no further from
        that peer."""
        if self._posted is not None and not sys.is_finalizing():
            self._watch()

    def _watch(self) -> StagedWork:
        if self._watched is None:
            posted, self._posted = self._posted, None
            self._watched = StagedWork([lambda: () if posted is None else (posted,)])
            if posted is None:
                self._watched.advance(0)
            else:
                _watching().put(self._watched)
        return self._watched


def pairwise(
    received: Sequence[Tensor], sent: Sequence[Tensor], *, group: dist.ProcessGroup, async_op: bool
) -> PairwiseWork:
    """Exchanges tensors between every two ranks of a gloo group: ``sent[j]`` goes to its rank j and
    ``received[j]`` comes from there, unless they are empty. All sizes may differ.

    All receives are posted before anything is sent. gloo announces a receive over the connection on which it
    sends, so a rank that sends first announces its receive only after its megabytes have gone. If both ranks
    do so, one waits for the other, and only one direction of the link is in use (gloo's own all_to_all and
    broadcasts take up to twice as long for this reason, depending on how threads happen to run).

    A separate thread posts both: a sender holds the connection while it copies its data into it, and a
    computing thread that is stopped at that time because its CPU quota is used up would also hold up
    everything that the peer sends here.
    """
    me, count, tag = dist.get_rank(group), len(sent), _next_tag(group)
    received[me].copy_(sent[me])
    others = range(1, count)
    sources = [j for j in ((me - k) % count for k in others) if received[j].numel()]
    targets = [j for j in ((me + k) % count for k in others) if sent[j].numel()]

    def post() -> list[dist.Work]:
        works = [dist.irecv(received[j], group=group, group_src=j, tag=tag) for j in sources]
        works += [dist.isend(sent[j], group=group, group_dst=j, tag=tag) for j in targets]
        return [work for work in works if work is not None]  # ranks outside the group get None

    posted = Posted(post)
    _posting().put(posted)
    return PairwiseWork(posted)


_tags: dict[str, int] = {}


def _next_tag(group: dist.ProcessGroup) -> int:
    """A tag that distinguishes one exchange from others of the group; all ranks begin exchanges in the same
    order."""
    tag = _tags[group.group_name] = (_tags.get(group.group_name, 0) + 1) % 2**30
    return tag


@cache
def _posting() -> SimpleQueue:
    return queue_of(1, "posts", Posted.post)


@cache
def _watching() -> SimpleQueue:
    return queue_of(WATCHING, "watches", lambda work: work.advance(0))


def begin_threads() -> None:
    """Starts the threads that exchanges need, now rather than at the first exchange: a thread inherits the
    limits (CPU time, cores) of the thread that starts it, and the computing thread's may change later."""
    _posting()
    _watching()


_threads: list[tuple[SimpleQueue, threading.Thread]] = []


def queue_of(threads: int, name: str, serve: Callable) -> SimpleQueue:
    """A queue of works, which ``threads`` threads ``serve`` in turn until ``end_threads``."""
    queue: SimpleQueue = SimpleQueue()

    def run() -> None:
        while (work := queue.get()) is not None:
            serve(work)
            del work  # so that neither the work nor its waiter is kept alive until the next one comes

    for n in range(threads):
        thread = threading.Thread(target=run, name=f"mixmesh {name} {n}", daemon=True)
        thread.start()
        _threads.append((queue, thread))
    return queue


@atexit.register
def end_threads() -> None:
    """Ends the threads of exchanges, which the next exchange starts again.

    A thread that comes back from a wait in PyTorch while the interpreter ends makes the process abort
    ("terminate called without an active exception") although all of its work was done: on a device with a
    small share of a core it may come back much later than the thread that computes.
    """
    until_s = time.monotonic() + END_S
    for queue, _ in _threads:
        queue.put(None)
    for _, thread in _threads:
        thread.join(max(until_s - time.monotonic(), 0))
    _threads.clear()
    _posting.cache_clear()
    _watching.cache_clear()
