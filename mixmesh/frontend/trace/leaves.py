"""The leaves of a batch: tensors are inputs of the program, other values are constants in it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import torch

from ...errors import TraceError
from .words import WORDS, is_words

TENSOR = "tensor"
# types of values that a plan records as text, so that a later call with another value is refused
BY_TEXT = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def describe_argument(value: Any) -> str:
    """A leaf of a call as a plan records it: "tensor", the value of a constant, or the type of anything
    else."""
    if isinstance(value, torch.Tensor):
        return TENSOR
    if is_words(value):
        return WORDS
    if isinstance(value, BY_TEXT):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_leaf(name: str, value: Any) -> None:
    """Raises TraceError for a leaf of a batch that no plan can record: a program would keep its contents from
    the first batch."""
    if isinstance(value, (torch.Tensor, *BY_TEXT)) or is_words(value):
        return
    raise TraceError(
        f"{name} of the batch holds a value that a program would keep as it was in the first batch",
        expected="tensors, numbers and strings in lists, tuples and dicts",
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        hint=instead_of(value),
    )


def instead_of(value: Any) -> tuple[str, ...]:
    """Hints on what to write instead of a value that a program cannot have as an input."""
    if isinstance(value, np.ndarray):
        return ("torch.from_numpy(array) in the data set or collate_fn",)
    if isinstance(value, np.generic):
        return "torch.as_tensor(value), for a number that changes", "value.item(), for one that stays"
    as_dict = "{...}"
    if dataclasses.is_dataclass(value):
        as_dict = "vars(batch)"
    return (
        "a forward that takes what it needs of it by name, and in the loop model(**values): "
        f"mixmesh.prepare(..., inputs=lambda batch: {as_dict})",
        "or a collate_fn that returns a dict of tensors",
    )
