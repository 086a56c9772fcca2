"""Notices in the first passes that gradients of an earlier pass are held during this one, where a device has
no room for both: a plan counts a step that begins without gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..base.progress import warn_once
from ..lang.ir import Program
from .accelerator import is_accelerator
from .comm import Comm
from .shard_numbers import Off

NUM_PASSES = 4  # forward passes that are looked at: what a loop does shows in its first two or three


@dataclass
class EarlierGradients:
    """Warns once, on the first rank, if the gradients that the loop keeps do not fit under ``plan``."""

    plan: Any  # a bare program has no prediction
    comm: Comm
    params: tuple[Tensor, ...]
    num_left: int = NUM_PASSES
    is_unsummed: bool = False  # whether gradients waited to be summed when the last forward pass began
    # (is_unsummed, are_added) that were held against the plan, which takes a walk over its program
    checked: set[tuple[bool, bool]] = field(default_factory=set)

    def before_forward(self, *, is_unsummed: bool) -> None:
        """Looks for gradients before a forward pass: the loop accumulates them, or drops them after it.
        ``is_unsummed``: they wait inside of the model to be summed."""
        self.num_left -= 1
        self.is_unsummed = is_unsummed
        if self.num_left >= 0 and (is_unsummed or self._are_there()):
            self._check(are_added=False)

    def before_backward(self) -> None:
        """Looks for gradients before a backward pass: its own are added to them when it is over."""
        if self.num_left >= 0 and self._are_there():
            self._check(are_added=True)

    def _are_there(self) -> bool:
        with Off():
            return any(p.grad is not None for p in self.params)

    def _check(self, *, are_added: bool) -> None:
        from .shapes.room import earlier_gradients_over

        way = self.is_unsummed, are_added
        if self.comm.rank or isinstance(self.plan, Program) or way in self.checked:
            return
        self.checked.add(way)
        cuda = is_accelerator(self.comm.device)
        text = earlier_gradients_over(self.plan, cuda=cuda, is_unsummed=self.is_unsummed, are_added=are_added)
        if text is not None:
            self.num_left = -1
            warn_once(text)
