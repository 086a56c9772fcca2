"""Compares two runs of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# the smallest scales of comparisons, relative to the largest entry of all gradients and of all buffers:
# smaller tensors (the running mean of centred activations) may be only rounding
GRADIENT_FLOOR, BUFFER_FLOOR = 1e-3, 1e-2


@dataclass(frozen=True)
class Outcome:
    """The results of a step: the loss, the gradients of parameters by name, the buffers afterwards, and the
    other outputs by name."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    shown: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Relative errors: of the loss, and of gradients and buffers by name."""

    loss: float
    errors: Mapping[str, float]

    @property
    def worst(self) -> str:
        return max(self.errors, key=self.errors.__getitem__, default="")

    @property
    def largest(self) -> float:
        return self.errors.get(self.worst, 0.0)

    def within(self, tolerance: float) -> bool:
        return self.loss <= tolerance and self.largest <= tolerance


def larger(a: Difference, b: Difference) -> Difference:
    """The larger error of each tensor."""
    names = {*a.errors, *b.errors}
    worst = {n: max(a.errors.get(n, 0.0), b.errors.get(n, 0.0)) for n in names}
    return Difference(max(a.loss, b.loss), worst)


def compare(got: Outcome, want: Outcome) -> Difference:
    """The errors of ``got``: of all gradients that either side has, of all buffers, and of the outputs of
    ``got``."""
    errors: dict[str, float] = {}
    floor = max(GRADIENT_FLOOR * _largest_of(want.gradients), _resolution(want))
    for name in {**want.gradients, **got.gradients}:
        errors[name] = relative_error(got.gradients.get(name), want.gradients.get(name), floor)
    floor = BUFFER_FLOOR * _largest_of(want.buffers)
    for name in got.buffers.keys() & want.buffers.keys():
        a, b = got.buffers[name], want.buffers[name]
        alike = a.shape == b.shape
        errors[name] = relative_error(a, b, floor if a.is_floating_point() else 0.0) if alike else math.inf
    for name, value in got.shown.items():
        alike = name in want.shown and value.shape == want.shown[name].shape
        errors[f"output {name}"] = relative_error(value, want.shown[name], 0.0) if alike else math.inf
    return Difference(_relative(abs(got.loss - want.loss), abs(want.loss)), errors)


def relative_error(a: Tensor | None, b: Tensor | None, floor: float) -> float:
    """The largest difference of entries, relative to the largest entry of ``b`` or to ``floor``, whichever is
    larger. None counts as zeros."""
    if a is None:
        if b is None:
            return 0.0
        a = b.new_zeros(b.shape)
    a, b = _dense(a), _dense(a.new_zeros(a.shape) if b is None else b)
    if not a.is_complex():
        a, b = a.double(), b.double()
    return _relative(_largest(a - b), max(_largest(b), floor))


def _largest_of(tensors: Mapping[str, Tensor | None]) -> float:
    present = [t for t in tensors.values() if t is not None]
    return max((_largest(t) for t in present if t.is_floating_point() or t.is_complex()), default=0.0)


def _resolution(outcome: Outcome) -> float:
    """The size below which gradients are rounding noise, relative to the loss."""
    dtypes = [g.dtype for g in outcome.gradients.values() if g is not None]
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return math.sqrt(eps) * abs(outcome.loss)


def _largest(t: Tensor) -> float:
    t = _dense(t)
    return t.abs().max().item() if t.numel() else 0.0


def _dense(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t


def _relative(difference: float, scale: float) -> float:
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
