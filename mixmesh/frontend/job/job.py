"""The job: the value that the user's function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

WORKLOAD = "workload:"


@dataclass(frozen=True)
class Job:
    """A model to train, with its batch and optimizer.

    ``model(**batch)`` (or ``model(*batch)`` for a tuple) returns a scalar loss or an object with ``.loss``.
    ``batch`` is one global example batch, with the samples in dim 0 of its tensors; tensors without dims are
    the same for all samples. ``optimizer`` maps parameters to a ``torch.optim`` optimizer; ``data`` is an
    iterable of batches like ``batch``. ``outputs`` names what the parallel model returns in addition to the
    loss, from what the model returns (``("logits",)``, or ``(1,)`` for a tuple).
    """

    model: Any
    batch: Mapping[str, Any] | tuple
    optimizer: Callable[[Iterable], Any] | None = None
    data: Iterable | None = None
    outputs: tuple[str | int, ...] = ()


def batch_size(batch: Mapping[str, Any] | tuple) -> int | None:
    """The number of samples in a batch; None if none of its tensors has dims."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else tuple(batch))
    return next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), None)
