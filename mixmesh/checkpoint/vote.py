"""Votes on anything that one rank notices and all must act on in the same step: a signal, or that it is time
to save."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .ranks import Ranks

PURPOSE = "vote"  # a separate group, as another thread may be writing a checkpoint


class Vote:
    """Finds the largest of two numbers over all ranks. At the end of every step each rank gives its numbers;
    all know the largest ones a step later, so that no step waits for the message."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._group = ranks, ranks.group(PURPOSE)
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def cast(self, first: int, second: int) -> tuple[int, int]:
        """The largest numbers of any rank in the previous call; 0 and 0 in the first call. A single rank gets
        its current numbers. Collective."""
        if self._group is None:
            return first, second
        with self._ranks.meeting("the end of a step"):
            decided = self.finish()
            told = torch.tensor([first, second])
            self._pending = dist.all_reduce(told, dist.ReduceOp.MAX, self._group, async_op=True), told
            return decided

    def finish(self) -> tuple[int, int]:
        """Waits for the last message, and returns its largest numbers. Collective."""
        if self._pending is None:
            return 0, 0
        (work, told), self._pending = self._pending, None
        comm = self._ranks.comm
        assert comm is not None  # there is a group
        comm.channel(comm.everyone, "whether to save and to stop", PURPOSE).finish(work)
        first, second = told.tolist()
        return first, second
