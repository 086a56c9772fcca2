"""Collectives that threads of this process carry on, each as a ``torch.distributed.Work``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue

import torch
import torch.distributed as dist

Stage = Callable[[], Sequence[dist.Work]]

WAITING = 4  # exchanges that are waited for at once: more are under way, and told of later


class StagedWork:
    """Stages that follow each other, each begun when all of the one before has ended."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages, self.done = stages, torch.futures.Future()
        self.over = threading.Event()  # set when what was to happen at the end has happened too
        self.error: Exception | None = None

    def advance(self, stage: int) -> None:
        """A failure is told to who waits; later stages are left out, and time out elsewhere."""
        if self.error is None and stage < len(self.stages):
            try:
                for work in self.stages[stage]():
                    work.wait()
            except Exception as error:
                self.error = error
        if stage != len(self.stages) - 1:
            return
        try:
            if self.error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(self.error)
        finally:
            self.over.set()

    def wait(self) -> None:
        self.over.wait()
        self.done.wait()

    def is_completed(self) -> bool:
        return self.over.is_set()

    def get_future(self) -> torch.futures.Future:
        return self.done


def pairwise(
    received: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    async_op: bool,
) -> StagedWork:
    """Between every two ranks of a gloo group, ``sent[j]`` goes to rank j of it and ``received[j]`` comes
    from there; what is empty does not. Sizes may all differ.

    All that is to be received is said before anything is sent. gloo says so over the connection that it
    sends over, so that a rank that sends first says it when its megabytes are gone. Where both do, the one
    waits for the other, and of the two ways of a link only one is in use (gloo's own all_to_all and
    broadcasts take up to twice as long for it, as threads happen to run).
    """
    me, count = dist.get_rank(group), len(sent)
    received[me].copy_(sent[me])
    steps = range(1, count)
    sources, targets = [(me - k) % count for k in steps], [(me + k) % count for k in steps]
    works = [dist.irecv(received[j], group=group, group_src=j) for j in sources if received[j].numel()]
    works += [dist.isend(sent[j], group=group, group_dst=j) for j in targets if sent[j].numel()]
    work = StagedWork((lambda: works,))
    _to_wait_for().put(work)
    return work


@cache
def _to_wait_for() -> SimpleQueue:
    """Of the threads that wait, as gloo says only to who waits that something has come. They end with the
    process."""
    queue: SimpleQueue = SimpleQueue()

    def serve() -> None:
        while True:
            queue.get().advance(0)

    for n in range(WAITING):
        threading.Thread(target=serve, name=f"mixmesh pairwise {n}", daemon=True).start()
    return queue
