"""The loss of the whole batch on every rank, from the addends of the computing ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.timeline import LOSS_SUM
from ..cost.communicators import LOSS_TOLD
from ..lang.ir import Program
from .collectives import Handle, all_reduce, done, then
from .comm import Comm
from .listeners import Listeners


class LossSum:
    """Sums the loss of a program over its ranks. Collective."""

    def __init__(self, program: Program, comm: Comm) -> None:
        self._listeners = Listeners(program)
        comm.add((("data", self._listeners.working), (LOSS_TOLD, self._listeners.told)))

    def start(self, comm: Comm, addend: Tensor, form: Program) -> Handle:
        """A handle on the sum of the addends of all ranks that compute in ``form``: the planned program, or
        that of another batch. Collective, and so is ``wait`` of the handle."""
        wide = addend if addend.dtype == torch.float64 else addend.float()
        working = self._listeners.working
        if not set(form.working_ranks) <= set(working):
            total = all_reduce.start(comm.channel(comm.everyone, LOSS_SUM), wide)
        else:
            if comm.rank in working:
                total = all_reduce.start(comm.channel(working, LOSS_SUM), wide)
            else:
                total = done(wide.clone())
            total = self._listeners.tell(comm, total, "the loss", LOSS_TOLD)
        return then(lambda whole: whole.to(addend.dtype), total)
