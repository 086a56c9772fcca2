"""The script's own module with whole weights, lent from when it is asked for until the next training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ...runtime.parallel import ParallelModel
from ...runtime.shard_tensor import plain
from ...runtime.whole_model import mark, own_module


class Lender:
    """The script's own module of a parallel model, whole while it is lent. Weights that were trained or
    changed since make it stale, and the next ``lend`` fills it anew."""

    def __init__(self, parallel: ParallelModel) -> None:
        self.parallel = parallel
        self._block: AbstractContextManager[nn.Module] | None = None
        self._module: nn.Module | None = None
        self._marks: list[tuple] = []

    @property
    def original(self) -> nn.Module:
        return own_module(self.parallel._runtime.original)

    def lend(self) -> nn.Module:
        """The module, in the modes that its modules have. Collective, unless it is lent already and the
        weights are the same."""
        with torch.inference_mode(False), torch.no_grad():  # weights that are filled in are trained later
            marks = self._current_marks()
            if self._block is not None and marks != self._marks:
                self.take_back()
            if self._block is None:
                self._block = self.parallel.whole()
                with modes_kept(self.original):
                    self._module, self._marks = self._block.__enter__(), marks
        return self._module

    def take_back(self) -> None:
        """Ends the lending, if there is one. Raises InputError if the module's weights were changed."""
        block, self._block, self._module = self._block, None, None
        if block is not None:
            with torch.inference_mode(False), modes_kept(self.original):
                block.__exit__(None, None, None)

    def give_weights(self) -> None:
        """Gives the parallel model the weights that the lent module has now, and ends the lending."""
        self.parallel.load_full_state_dict(self._module.state_dict())
        self.take_back()

    def _current_marks(self) -> list[tuple]:
        tensors: list[Any] = [*self.parallel.parameters(), *self.parallel.buffers()]
        return [mark(plain(x)) for x in tensors]


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module of ``model`` trains or evaluates as it did before."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
