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
    iterable of batches like ``batch``. ``scheduler`` maps the optimizer to a learning rate scheduler, which
    is stepped after each of the optimizer's steps. ``scaler`` is a ``torch.amp.GradScaler``, for a model in
    float16: the loss is scaled, and all ranks skip a step whose gradients overflow. ``outputs`` names what
    the parallel model returns in addition to the loss, from what the model returns (``("logits",)``, or
    ``(1,)`` for a tuple).
    """

    model: Any
    batch: Mapping[str, Any] | tuple
    optimizer: Callable[[Iterable], Any] | None = None
    data: Iterable | None = None
    outputs: tuple[str | int, ...] = ()
    scheduler: Callable[[Any], Any] | None = None
    scaler: Any = None


def batch_size(batch: Mapping[str, Any] | tuple) -> int | None:
    """The number of samples in a batch; None if none of its tensors has dims."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else tuple(batch))
    return next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), None)


def samples_of_data(data: Any) -> int | None:
    """Samples in an epoch of a job's data: those that the sampler of a DataLoader draws, or all rows of a
    list of batches. None if the length of the data is unknown, as for an iterator. Nothing is read."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(data, list | tuple):
        sizes = [batch_size(batch if isinstance(batch, Mapping) else (batch,)) for batch in data]
        known_sizes = [size for size in sizes if size is not None]
        return sum(known_sizes) if len(known_sizes) == len(sizes) else None
    if not isinstance(data, DataLoader):
        return None
    drawn: Any = data.dataset if isinstance(data.dataset, IterableDataset) else data.sampler
    try:
        if data.drop_last and data.batch_size is not None:
            return len(data) * data.batch_size
        return len(drawn) if data.batch_size is not None else None
    except TypeError:  # the data set or the sampler has no length
        return None
