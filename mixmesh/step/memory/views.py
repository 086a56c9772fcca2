"""Determines which results are views of their input: strides as PyTorch computes them, on whole tensors.

A view costs nothing and keeps its base alive; a reshape that no strides can express is a copy.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ...lang.rules import Call

Shape = tuple[int, ...]


@lru_cache(maxsize=4096)
def contiguous(shape: Shape) -> Shape:
    """Strides of a tensor in memory order."""
    out = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        out[dim] = out[dim + 1] * max(shape[dim + 1], 1)
    return tuple(out)


@lru_cache(maxsize=4096)
def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether every element has its own place and none is skipped, in any order of dims."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(shape, strides) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=4096)
def reshaped(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of ``view(new)``; None if it needs a copy (at::detail::computeStride)."""
    if math.prod(shape) == 0:
        return contiguous(new)
    out = [0] * len(new)
    at = len(new) - 1
    chunk, base = 1, strides[-1] if strides else 1
    wanted = 1
    for dim in range(len(shape) - 1, -1, -1):
        chunk *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != chunk * base):
            while at >= 0 and (wanted < chunk or new[at] == 1):
                out[at] = wanted * base
                wanted *= new[at]
                at -= 1
            if wanted != chunk:
                return None
            if dim > 0:
                chunk, wanted, base = 1, 1, strides[dim - 1]
    for dim in range(at, -1, -1):  # leading dims of size one
        out[dim] = wanted * base
    return tuple(out) if all(new[dim] == 1 for dim in range(at + 1)) else None


def view_of(call: Call, strides: Shape) -> Shape | None:
    """Strides of the first result as a view of the first input, which has ``strides``; None for a copy."""
    shape, new = call.inputs[0].shape, call.outputs[0].shape
    match call.op:
        case "aten.view":
            return reshaped(shape, strides, new)
        case "aten.transpose.int" | "aten.t":
            a, b = call.args[1:3] if call.op != "aten.t" else (0, len(shape) - 1)
            out = list(strides)
            if out:
                out[a], out[b] = out[b], out[a]
            return tuple(out)
        case "aten.permute":
            return tuple(strides[d] for d in call.args[1])
        case "aten.expand" | "aten.broadcast_tensors":
            lead = len(new) - len(shape)
            old = zip(shape, new[lead:], strides)
            return (0,) * lead + tuple(0 if a == 1 and b != 1 else s for a, b, s in old)
        case "aten.unsqueeze":
            dim = call.args[1] % len(new)
            after = strides[dim] * shape[dim] if dim < len(shape) else 1
            return (*strides[:dim], after, *strides[dim:])
        case "aten.squeeze" | "aten.squeeze.dim" | "aten.squeeze.dims":
            return reshaped(shape, strides, new)
        case "aten.select.int" | "aten.unbind.int":
            dim = call.arg(1, "dim", 0) % len(shape)
            return strides[:dim] + strides[dim + 1 :]
        case "aten.slice.Tensor":
            dim = call.arg(1, "dim", 0) % len(shape)
            step = call.arg(4, "step", 1)
            return (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
    return strides
