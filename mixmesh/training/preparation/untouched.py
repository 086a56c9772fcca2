"""Takes a batch from a loader, a sampler or a data set without changing its state."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ...frontend.trace.own_generators import GENERATORS

T = TypeVar("T")
SOURCES = DataLoader, IterableDataset, Sampler
COLLECTIONS = list, dict, set, deque


def untouched(source: T) -> T:
    """A copy of a loader, a sampler or a data set that gives the same batches and leaves ``source``
    unchanged: it has its own generators, counters, lists and orders, and shares the data. So has an object
    around a loader, whose workers may persist. Returns ``source`` itself if it is of another kind, or cannot
    be copied."""
    return _copied(source, {})


def _copied(source: Any, made: dict[int, Any]) -> Any:
    """The copy of ``source``; ``made`` are earlier copies by the ``id`` of their originals, so that the
    copies share objects as the originals do."""
    if id(source) in made:
        return made[id(source)]
    if not isinstance(source, SOURCES) and not _is_around_a_loader(source):
        return source
    try:
        new = made[id(source)] = copy.copy(source)
        vars(new).update({name: _own(value, made) for name, value in vars(new).items()})
    except Exception:  # copying an object of any class may fail in any way
        new = made[id(source)] = source
    return new


def _is_around_a_loader(source: Any) -> bool:
    """Whether an object is no iterator and holds a loader, as one that moves batches to a device ahead."""
    held = getattr(source, "__dict__", {}).values()
    return (
        hasattr(source, "__iter__")
        and not hasattr(source, "__next__")
        and any(isinstance(value, DataLoader) for value in held)
    )


def _own(value: Any, made: dict[int, Any]) -> Any:
    if id(value) not in made and not isinstance(value, SOURCES):
        made[id(value)] = _with_own_memory(value)
    return _copied(value, made)


def _with_own_memory(value: Any) -> Any:
    if isinstance(value, GENERATORS):
        return copy.deepcopy(value)
    if isinstance(value, COLLECTIONS):
        return copy.copy(value)
    if isinstance(value, torch.Tensor):
        return value.clone() if value.ndim == 1 and not value.is_floating_point() else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.ndim == 1 and value.dtype.kind in "iu" else value
    return value
