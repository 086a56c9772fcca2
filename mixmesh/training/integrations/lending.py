"""The script's own module, lent with whole weights until the next training step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...runtime.modes import modes_kept
from ...runtime.parallel import ParallelModel
from ...runtime.shard_tensor import plain
from ...runtime.whole_model import mark, own_module


@dataclass(frozen=True)
class _Loan:
    """A ``module`` that is lent while ``block`` is entered; ``marks`` are the state of the parallel model's
    tensors when the module was filled."""

    block: AbstractContextManager[nn.Module]
    module: nn.Module
    marks: list[tuple]


class Lender:
    """Lends the script's own module of a parallel model, with whole weights. A loan is out of date when the
    parallel model's weights have changed; the next ``lend`` then fills the module again."""

    def __init__(self, parallel: ParallelModel) -> None:
        self.parallel = parallel
        self._loan: _Loan | None = None
        self._num_steps = 0

    @property
    def original(self) -> nn.Module:
        return own_module(self.parallel._runtime.original)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts a loan out of date at every step of ``optimizer``, also on ranks that hold no weights."""
        optimizer.register_step_post_hook(lambda *_: self._count_step())

    def _count_step(self) -> None:
        self._num_steps += 1

    def lend(self) -> nn.Module:
        """The module; its submodules train or evaluate as before. Collective, unless it is lent already and
        the weights are the same."""
        with torch.inference_mode(False), torch.no_grad():  # weights filled in here are trained later
            marks = self._current_marks()
            if self._loan is not None and marks != self._loan.marks:
                self.take_back()
            if self._loan is None:
                block = self.parallel.whole()
                with modes_kept(self.original.modules()):
                    self._loan = _Loan(block, block.__enter__(), marks)
        return self._loan.module

    def take_back(self) -> None:
        """Ends the loan, if there is one. Raises InputError if the module's weights were changed."""
        loan, self._loan = self._loan, None
        if loan is not None:
            with torch.inference_mode(False), modes_kept(self.original.modules()):
                loan.block.__exit__(None, None, None)

    def return_weights(self) -> None:
        """Loads the current weights of the lent module into the parallel model, and ends the loan."""
        if self._loan is not None:
            self.parallel.load_full_state_dict(self._loan.module.state_dict())
            self.take_back()

    def _current_marks(self) -> list[tuple]:
        tensors: list[Any] = [*self.parallel.parameters(), *self.parallel.buffers()]
        return [(self._num_steps,), *(mark(plain(x)) for x in tensors)]
