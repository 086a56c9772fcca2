"""Finds the parameters and buffers of a model that share memory without being one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from ..errors import InputError
from .original import TakenOver
from .shards import Stored

is_dense = torch.ops.aten.is_non_overlapping_and_dense


def check_apart(model: nn.Module, stored: Mapping[str, Stored], world_size: int) -> None:
    """Raises InputError for two tensors of ``model`` that share elements, such as after ``b.weight.data =
    a.weight.data``, if one is cut or copied: on one device a step of either changes both."""
    for both in _overlaps(model):
        one, other = both
        if all(stored[name].is_everywhere(world_size) and is_dense(t) for name, t in both.items()):
            continue  # they stay where they are
        raise InputError(
            f"{one} and {other} share memory, and under the plan each has its own",
            expected="parameters that are one tensor, or that have memory of their own",
            got=f"two tensors with common elements: a step of {one} would no longer change {other}",
            hint=(
                "one parameter under two names: decoder.weight = encoder.weight, without .data",
                "or memory of its own: nn.Parameter(other.detach().clone())",
                'planner="ddp-proportional", which keeps parameters whole',
            ),
        )


def _overlaps(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields, by name, every two tensors of a model with common elements, of which one is trained. Views
    of one memory that lie beside each other have none."""
    by_memory: dict[int, list[tuple[str, Tensor]]] = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        # one that an earlier model has taken over holds no values here
        if not isinstance(t, TakenOver) and t.layout is torch.strided and t.numel():
            by_memory.setdefault(t.untyped_storage()._cdata, []).append((name, t))
    for tensors in by_memory.values():
        for (one, x), (other, y) in combinations(tensors, 2):
            if not (x.requires_grad or y.requires_grad):
                continue
            if _end(x) > _begin(y) and _end(y) > _begin(x) and _have_common(x, y):
                yield {one: x, other: y}


def _begin(t: Tensor) -> int:
    """The first byte of a tensor in its memory."""
    return int(t.storage_offset()) * t.element_size()


def _end(t: Tensor) -> int:
    """The byte after its last one."""
    steps = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return _begin(t) + (steps + 1) * t.element_size()


def _have_common(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors whose memory overlaps have an element in common: columns of one matrix do not."""
    if x.element_size() != y.element_size():
        return True
    first = min(x.storage_offset(), y.storage_offset())
    marks = torch.zeros(max(_end(x), _end(y)) // x.element_size() - first, dtype=torch.uint8)
    marks.as_strided(x.shape, x.stride(), x.storage_offset() - first).fill_(1)
    return bool(marks.as_strided(y.shape, y.stride(), y.storage_offset() - first).any())
