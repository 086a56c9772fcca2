"""How far two runs of a step are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

GRADIENT_FLOOR = 1e-3  # times the largest gradient entry: below it, a tensor is compared on that scale
BUFFER_FLOOR = 1e-2  # times the largest buffer entry: the running mean of centred activations is rounding


@dataclass(frozen=True)
class Outcome:
    """The loss of a step, the gradients of its parameters by name, its buffers afterwards, and what the model
    returned beside the loss, by name."""

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
    """The larger of two errors, each by name."""
    names = {*a.errors, *b.errors}
    worst = {n: max(a.errors.get(n, 0.0), b.errors.get(n, 0.0)) for n in names}
    return Difference(max(a.loss, b.loss), worst)


def compare(got: Outcome, want: Outcome) -> Difference:
    """Errors of ``got``: of gradients that either has, of all buffers, and of the outputs that ``got``
    has."""
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
    """The largest difference of entries beside the largest entry of ``b``, or ``floor`` if that is more. No
    tensor at all is one of zeros."""
    if a is None and b is None:
        return 0.0
    a = b.new_zeros(b.shape) if a is None else a
    b = a.new_zeros(a.shape) if b is None else b
    a, b = _dense(a), _dense(b)
    if not a.is_complex():
        a, b = a.double(), b.double()
    return _relative(_largest(a - b), max(_largest(b), floor))


def _largest_of(tensors: Mapping[str, Tensor | None]) -> float:
    present = [t for t in tensors.values() if t is not None]
    return max((_largest(t) for t in present if t.is_floating_point() or t.is_complex()), default=0.0)


def _resolution(outcome: Outcome) -> float:
    """Gradients that are this small beside the loss are rounding noise, however they are computed."""
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
