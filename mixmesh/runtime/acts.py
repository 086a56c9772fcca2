"""Counts of what the script does with gradients, which every rank must do alike.

Where a parameter is cut, no rank can see that another one has dropped, scaled or clipped its piece of the
gradient: there is nothing to compare the values with. But ranks that run one script do the same to all
pieces. So each counts, for every piece that it holds, the backward passes that found a gradient, the
optimizer's steps that had one, those whose gradient the script had changed, and the backward passes after
which the piece was written to, be it by an optimizer that ``prepare`` has not seen; and adds up the numbers
by which losses were multiplied. ``drift`` compares the counts now and then.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, optim

from .shard_numbers import Off

NUM_COUNTS = 5
NO_COUNTS = (float("nan"),) * NUM_COUNTS  # for a rank that holds no piece of a parameter


@dataclass
class Counts:
    """The counts for one piece of a parameter. ``last`` is its gradient after the last backward pass: which
    one, and how often it had been written."""

    num_kept: int = 0  # backward passes that found a gradient of earlier ones
    num_stepped: int = 0  # steps of the optimizer with a gradient
    num_changed: int = 0  # steps among them whose gradient the script had changed
    num_written: int = 0  # backward passes after which the piece was written to
    last: weakref.ref[Tensor] | None = None
    version: int = 0
    version_of_piece: int | None = None  # in the last backward pass


@dataclass
class Acts:
    """The counts of this rank for its ``pieces`` of cut parameters, by name, and the sum of the gradients
    that losses were given since it was last ``taken``."""

    pieces: Mapping[str, Tensor]
    weights: Tensor | None = None
    _counts: dict[str, Counts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counts = {name: Counts() for name in self.pieces}

    def in_backward(self, weight: Tensor | None) -> None:
        """Called in a backward pass of the script, before its gradients are added to parameters. ``weight``
        is the gradient of the loss, if the model has one."""
        if weight is not None:
            own = weight.detach().double()
            self.weights = own if self.weights is None else self.weights + own
        if self.pieces:
            for name, p in self.pieces.items():
                counts = self._counts[name]
                counts.num_kept += p.grad is not None
                counts.num_written += counts.version_of_piece not in (None, p._version)
                counts.version_of_piece = p._version
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        with Off():
            for name, p in self.pieces.items():
                if p.grad is not None:
                    counts = self._counts[name]
                    counts.last, counts.version = weakref.ref(p.grad), p.grad._version

    def before_step(self) -> None:
        """Called before a step of the optimizer."""
        with Off():
            for name, p in self.pieces.items():
                if p.grad is not None:
                    counts = self._counts[name]
                    counts.num_stepped += 1
                    is_last = counts.last is not None and counts.last() is p.grad
                    counts.num_changed += not (is_last and counts.version == p.grad._version)

    def of(self, name: str, optimizer: optim.Optimizer | None) -> tuple[float, ...]:
        """The ``NUM_COUNTS`` counts for one parameter; the last is the optimizer's own count of its steps (-1
        without one)."""
        counts = self._counts.get(name)
        if counts is None:
            return NO_COUNTS
        with Off():
            state = {} if optimizer is None else optimizer.state.get(self.pieces[name]) or {}
            step = state.get("step", -1)
        is_number = isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1)
        own = float(step) if is_number else -1
        return counts.num_kept, counts.num_stepped, counts.num_changed, counts.num_written, own

    def taken(self) -> float:
        """The sum of the gradients of losses since the last call."""
        weights, self.weights = self.weights, None
        return 0.0 if weights is None else float(weights)


def text_of(counts: tuple[float, ...]) -> str:
    """The counts of ``Acts.of`` in words."""
    kept, stepped, changed, written, step = counts
    own = f", and {step:.0f} by the optimizer's own count" if step >= 0 else ""
    return (
        f"{stepped:.0f} steps with its gradient, {changed:.0f} of them with a changed one{own}; "
        f"{kept:.0f} backward passes added to an earlier one; "
        f"written to after {written:.0f} backward passes"
    )
