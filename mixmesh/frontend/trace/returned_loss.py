"""The loss in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import TraceError

NUMBERS = int | float | torch.SymInt | torch.SymFloat


def loss_of(output: Any) -> Any:
    """The loss in a model's return value: the value itself, its "loss" entry or ``loss`` attribute, or the
    only floating-point scalar in a tuple. None if there is no loss."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list):
        scalars = [x for x in output if is_loss(x)]
        loss = scalars[0] if len(scalars) == 1 else None
    return loss


def is_loss(x: Any) -> bool:
    """Whether a value is a floating-point scalar."""
    return isinstance(x, torch.Tensor) and x.ndim == 0 and x.dtype.is_floating_point


def check_loss(loss: Any, output: Any, where: str) -> torch.Tensor:
    """Returns ``loss``. Raises TraceError, with advice for this ``output``, if it is no scalar loss."""
    if is_loss(loss):
        return loss
    hint = "return the loss of the whole batch, for example nn.functional.cross_entropy(logits, labels)"
    if not isinstance(output, torch.Tensor) and loss is None and _offers_loss(output):
        hint = "put labels into the batch, so that the model computes its loss"
    elif loss is None and _num_losses(output) > 1:
        hint = _hint_for_several(output)
    elif isinstance(loss, torch.Tensor) and loss.ndim == 1 and loss.is_floating_point():
        hint = "return the mean of the samples' losses: loss.mean()"
    elif isinstance(loss, NUMBERS) or isinstance(output, NUMBERS):
        hint = "return the tensor itself, without .item() or float()"
    got = _describe(output) if loss is output or loss is None else f"a loss that is {_describe(loss)}"
    raise TraceError(
        "the model does not return a scalar loss",
        expected="a floating-point scalar tensor, an object or dict with such a .loss, or a tuple with one",
        got=got,
        where=where,
        hint=hint,
    )


def _hint_for_several(output: Mapping | tuple | list) -> str:
    """The hint for a model that returns several scalars. If only one has a gradient, the others are
    metrics."""
    named = output.items() if isinstance(output, Mapping) else enumerate(output)
    learning = [name for name, x in named if is_loss(x) and x.requires_grad]
    if len(learning) == 1:
        return f"mixmesh.prepare(..., loss=lambda out: out[{learning[0]!r}]): the others have no gradient"
    total = "sum(losses.values())" if isinstance(output, Mapping) else "sum(losses)"
    return f"mixmesh.prepare(..., loss=lambda losses: {total}), or a forward that returns the sum"


def _num_losses(output: Any) -> int:
    values = output.values() if isinstance(output, Mapping) else output
    return sum(map(is_loss, values)) if isinstance(output, Mapping | tuple | list) else 0


def _offers_loss(output: Any) -> bool:
    return isinstance(output, Mapping) and "logits" in output or "loss" in dir(output)


def _describe(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"a tensor of shape {list(x.shape)} and dtype {str(x.dtype).removeprefix('torch.')}"
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, Mapping):
        return f"{type(x).__name__} with {', '.join(map(str, x)) or 'nothing'}"
    return "a number, which has no gradient" if isinstance(x, NUMBERS) else type(x).__name__
