"""Asking what gives batches for one, without its noticing."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

T = TypeVar("T")
SOURCES = DataLoader, IterableDataset, Sampler
GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
COLLECTIONS = list, dict, set, deque


def untouched(source: T) -> T:
    """A copy of a loader, a sampler or a data set that gives the same batches and leaves ``source`` as it is:
    it has generators, counters, lists and orders of its own, and shares the data. ``source`` itself where it
    is of another kind, or cannot be copied."""
    if not isinstance(source, SOURCES):
        return source
    try:
        made = copy.copy(source)
        vars(made).update({name: _own(value) for name, value in vars(made).items()})
    except Exception:  # of its own ways to be copied, of any kind
        return source
    return made


def _own(value: Any) -> Any:
    if isinstance(value, GENERATORS):
        return copy.deepcopy(value)
    if isinstance(value, COLLECTIONS):
        return copy.copy(value)
    if isinstance(value, torch.Tensor):
        return value.clone() if value.ndim == 1 and not value.is_floating_point() else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.ndim == 1 and value.dtype.kind in "iu" else value
    return untouched(value)
