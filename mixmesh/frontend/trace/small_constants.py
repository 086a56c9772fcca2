"""Numbers that a forward pass reads from small tensors of its own, such as ``torch.tensor([x.shape[-1] for x
in crops])``: the program keeps them, as they follow from shapes and constants.

PyTorch does this for tensors of one element. It forgets the number when the tensor is overwritten, but not
when a view of it is, ``t[0] = x.sum()``; then a read would return the number from before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from ...base.patch import patched

MOST_ELEMENTS = 64  # lengths, sizes and counts of the parts of a batch


@contextmanager
def small_constants_kept() -> Iterator[None]:
    """A context for an export, in which the values of such tensors are known until the pass writes others
    into them."""
    call = proxy_tensor.proxy_call

    def traced_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            _forget_written(mode.tracer, func, args, kwargs)
        return call(mode, func, pre_dispatch, args, kwargs)

    with (
        patched(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_ELEMENTS),
        patched(proxy_tensor, "CONSTANT_NUMEL_LIMIT", MOST_ELEMENTS),
        patched(proxy_tensor, "proxy_call", traced_call),
    ):
        yield


def _forget_written(tracer: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Forgets the values of all tensors that share memory with one that ``func`` writes to, unless it writes
    known values."""
    known = [_value_of(tracer, x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if all(value is not None for value in known):
        return
    written = [_value_of(tracer, x) for x in _written(func, args, kwargs)]
    places = {value.untyped_storage().data_ptr() for value in written if value is not None}
    if not places:
        return
    for tracked in list(tracer.tensor_tracker.values()):
        value = getattr(tracked, "constant", None)
        if value is not None and value.untyped_storage().data_ptr() in places:
            tracked.constant = None


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            yield from (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


def _value_of(tracer: Any, x: Tensor) -> torch.Tensor | None:
    """The value of a tensor that the tracer knows, else None."""
    return getattr(proxy_tensor.get_proxy_slot(x, tracer, None), "constant", None)
