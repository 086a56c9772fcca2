"""Ranks that compute nothing, and how they hear what the others have agreed on.

A plan leaves out a device that is slow or far away. Those that compute must not wait for it in every step:
they talk among themselves, and the first of them tells the others, without waiting until they have heard it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..lang.ir import Program
from .collectives import Handle, broadcast, done, then
from .comm import Comm


class Listeners:
    """The ranks that compute nothing in a program. ``working`` are those that do, ``told`` the others and the
    one that tells them; nobody if there are no others."""

    def __init__(self, program: Program) -> None:
        self.working = program.working_ranks
        working = set(self.working)
        idle = [r for r in range(program.world_size) if r not in working]
        self.told = tuple(sorted((self.working[0], *idle))) if idle else ()
        self._last: Handle = done(torch.empty(0))

    def tell(self, comm: Comm, known: Handle, what: str, purpose: str) -> Handle:
        """A handle on what those that compute get of ``known``, which elsewhere only has the same shape and
        dtype. Collective in the group of this ``purpose``, and so is ``wait`` of the handle."""
        if comm.rank not in self.told:
            return known
        # the first of those that compute tells later than the others begin to listen
        channel = comm.channel(self.told, f"broadcast of {what}", purpose, is_call=False)
        if comm.rank != self.working[0]:
            return broadcast.start(channel, known.wait(), self.working[0])

        def told(value: Tensor) -> Tensor:
            self._last.wait()
            self._last = broadcast.start(channel, value.clone(), comm.rank)
            return value

        return then(told, known)
