"""A job as a value: what the user's function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WORKLOAD = "workload:"


@dataclass(frozen=True)
class Job:
    """A model to train, with its batch and optimizer.

    ``model(**batch)`` (or ``model(*batch)`` for a tuple) returns a scalar loss or an object with
    ``.loss``. ``batch`` is one global example batch, the samples in dim 0 of its tensors; tensors without
    dims stand for themselves. ``optimizer`` maps parameters to a ``torch.optim`` optimizer, ``data`` is
    iterated over for batches like ``batch``. ``outputs`` names what the parallel model returns beside the
    loss, of what the model does (``("logits",)``, or ``(1,)`` of a tuple).
    """

    model: Any
    batch: Mapping[str, Any] | tuple
    optimizer: Callable[[Iterable], Any] | None = None
    data: Iterable | None = None
    outputs: tuple[str | int, ...] = ()


def batch_size(batch: Mapping[str, Any] | tuple) -> int | None:
    """Samples in a batch; None if no tensor of it has dims."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else tuple(batch))
    return next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), None)
