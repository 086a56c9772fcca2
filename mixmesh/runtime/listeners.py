"""Passes on what the computing ranks agreed on to the ranks that compute nothing.

A plan may leave out a device that is slow or far away. The computing ranks must not wait for it in every
step: they communicate among themselves, and the first of them broadcasts to the others without waiting for
them to receive it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..lang.ir import Program
from .collectives import Handle, broadcast, done, then
from .comm import Comm


class Listeners:
    """The ranks that compute nothing in a program. ``working`` are the ranks that compute; ``told`` are the
    others and the one that broadcasts to them, empty if there are no others."""

    def __init__(self, program: Program) -> None:
        self.working = program.working_ranks
        working = set(self.working)
        idle = [r for r in range(program.world_size) if r not in working]
        self.told = tuple(sorted((self.working[0], *idle))) if idle else ()
        self._last: Handle = done(torch.empty(0))

    def tell(self, comm: Comm, known: Handle, what: str, purpose: str) -> Handle:
        """A handle that gives every rank the working ranks' ``known``; on other ranks ``known`` only provides
        shape and dtype. Collective in the group of this ``purpose``, and so is the handle's ``wait``."""
        if comm.rank not in self.told:
            return known
        # the first working rank sends later than the others begin to listen
        channel = comm.channel(self.told, f"broadcast of {what}", purpose, is_call=False)
        if comm.rank != self.working[0]:
            return broadcast.start(channel, known.wait(), self.working[0])

        def told(value: Tensor) -> Tensor:
            self._last.wait()
            self._last = broadcast.start(channel, value.clone(), comm.rank)
            return value

        return then(told, known)
