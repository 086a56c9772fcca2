"""The script's own module with whole weights, lent from when it is asked for until the next training step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..runtime.parallel import ParallelModel
from ..runtime.shard_tensor import plain
from ..runtime.whole_model import mark


class Lender:
    """The script's own module of a parallel model, whole while it is lent. Weights that were trained or
    changed since make it stale, and the next ``lend`` fills it anew."""

    def __init__(self, parallel: ParallelModel) -> None:
        self.parallel = parallel
        self._block: AbstractContextManager[nn.Module] | None = None
        self._module: nn.Module | None = None
        self._marks: list[tuple] = []

    def lend(self) -> nn.Module:
        """The module, in the modes of the parallel model's modules. Collective, unless it is lent already and
        the weights are the same."""
        marks = self._current_marks()
        if self._block is not None and marks != self._marks:
            self.take_back()
        if self._block is None:
            self._block = self.parallel.whole()
            self._module, self._marks = self._block.__enter__(), marks
        modes = {name: module.training for name, module in self.parallel.named_modules()}
        for name, module in self._module.named_modules():
            module.training = modes.get(name, self.parallel.training)
        return self._module

    def take_back(self) -> None:
        """Ends the lending, if there is one. Raises InputError if the module's weights were changed."""
        block, self._block, self._module = self._block, None, None
        if block is not None:
            block.__exit__(None, None, None)

    def give_weights(self) -> None:
        """Gives the parallel model the weights that the lent module has now, and ends the lending."""
        self.parallel.load_full_state_dict(self._module.state_dict())
        self.take_back()

    def _current_marks(self) -> list[tuple]:
        tensors: list[Any] = [*self.parallel.parameters(), *self.parallel.buffers()]
        return [mark(plain(x)) for x in tensors]
