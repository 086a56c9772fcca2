"""The script's own module, lent with whole weights until the next training step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...runtime.first_rank import everyones
from ...runtime.modes import modes_kept
from ...runtime.parallel import ParallelModel
from ...runtime.shard_tensor import plain
from ...runtime.whole_model import Lending, mark, own_module
from ..preparation.alike import digest


@dataclass(frozen=True)
class _Loan:
    """A ``module`` that is lent while ``block`` is entered; ``marks`` are the state of the parallel model's
    tensors when the module was filled."""

    block: Lending
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
                self._take_back_unchanged()
            if self._loan is None:
                block = self.parallel.whole()
                with modes_kept(self.original.modules()):
                    self._loan = _Loan(block, block.__enter__(), marks)
        return self._loan.module

    def _take_back_unchanged(self) -> None:
        """Ends the loan, if there is one. Raises InputError if the module's weights were changed."""
        if self._loan is not None:
            self._end(self._loan.block.changed())

    def take_back(self) -> None:
        """Ends the loan, if there is one. Weights that the script has changed in the module, alike on every
        rank, train from now on. Raises InputError if ranks have changed them differently. Collective while it
        is lent."""
        if self._loan is None or self._loan.marks != self._current_marks():
            return self._take_back_unchanged()
        changed = self._loan.block.changed()
        digests = everyones(digest(changed) if changed else "")
        if len(set(digests)) > 1:
            self._end(None)
            raise changed_by_some(changed, digests)
        if changed:
            self.parallel.load_full_state_dict(self._loan.module.state_dict())
        return self._end(())  # looked at above

    def _end(self, changed: Collection[str] | None) -> None:
        """Ends the loan, of which ``changed`` weights would be lost; None checks nothing."""
        loan, self._loan = self._loan, None
        assert loan is not None
        with torch.inference_mode(False), modes_kept(self.original.modules()):
            loan.block.close(changed)

    def return_weights(self) -> None:
        """Loads the current weights of the lent module into the parallel model, and ends the loan."""
        if self._loan is not None:
            self.parallel.load_full_state_dict(self._loan.module.state_dict())
            self._end(())

    def _current_marks(self) -> list[tuple]:
        tensors: list[Any] = [*self.parallel.parameters(), *self.parallel.buffers()]
        return [(self._num_steps,), *(mark(plain(x)) for x in tensors)]


def changed_by_some(changed: Mapping[str, torch.Tensor], digests: Sequence[str]) -> InputError:
    """The error for weights that this rank has ``changed``, while others have changed them otherwise:
    ``digests`` are those of all ranks, empty where nothing was changed."""
    unchanged = [rank for rank, each in enumerate(digests) if not each]
    which = f"not on ranks {', '.join(map(str, unchanged))}" if unchanged else "to other values on some ranks"
    return InputError(
        "weights of the whole model were changed on some ranks only",
        expected="the same change on every rank, or none",
        got=f"{', '.join(list(changed)[:3]) or 'weights'}, {which}",
        hint=(
            "model.load_state_dict(torch.load(path))  # on every rank, in Accelerate unwrap_model(model)",
            "copy.deepcopy(model)  # a change for a file is made in a copy",
        ),
    )
