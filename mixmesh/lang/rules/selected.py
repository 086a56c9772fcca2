"""The rule of the operator for selected rows (``operators.selected``)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .rule import Call

SELECTED = "mixmesh.selected"
ROWS, ALONG, DIM, WHOLE, BODY, SHARE = 1, 2, 3, 4, 6, 7  # places of arguments


def selected_share(call: Call) -> float:
    """The expected part of the rows that are selected."""
    share = call.args[SHARE]
    assert isinstance(share, float)
    return share


def count_whole(call: Call) -> int:
    """The number of tensors that all rows share; they are the last ones."""
    return _count(call, WHOLE)


def _count(call: Call, place: int) -> int:
    tensors = call.args[place]
    assert isinstance(tensors, tuple)
    return len(tensors)


def _mask_dims(call: Call) -> list[str]:
    return [f"m{d}" for d in range(len(call.inputs[0].shape))]


def _terms(call: Call) -> Iterator[tuple[str, str, int]]:
    """Yields the name in the body of each tensor after the mask, its dims that are the mask's, and the number
    of its dims."""
    groups: tuple[tuple[str, int, list[str]], ...]
    groups = ("x", ROWS, _mask_dims(call)), ("s", ALONG, [f"m{call.args[DIM]}"]), ("w", WHOLE, [])
    at = 1
    for prefix, place, head in groups:
        for n in range(_count(call, place)):
            yield f"{prefix}{n}", " ".join(head), len(call.inputs[at].shape) - len(head)
            at += 1


def selected(call: Call) -> str:
    """selected(mask, rows, along, dim, whole, dtypes, body, share, kept_bytes): the dims of the mask may be
    cut, each of its rows is computed by itself."""
    of_mask = " ".join(_mask_dims(call))
    terms = [of_mask]
    for name, head, others in _terms(call):
        terms.append(" ".join([head, *(f"{name}_{d}!" for d in range(others))]).strip())
    others = len(call.outputs[0].shape) - len(call.inputs[0].shape)
    return f"{', '.join(terms)} -> {' '.join([of_mask, *(f'o{d}!' for d in range(others))])}"


def selected_flops(call: Call) -> str:
    """The products with matrices of the selected rows."""
    of_mask = " ".join(_mask_dims(call))
    matrices = re.findall(r"(?:linear|matmul|mm)\(\w+, (w\d+)", str(call.args[BODY]))
    return " + ".join(f"{selected_share(call)} {of_mask} {name}_0 {name}_1" for name in matrices)
