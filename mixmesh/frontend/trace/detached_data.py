"""Export of ``x.data``, which PyTorch's own does not follow."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ...base.patch import patched
from ...errors import TraceError
from .locate import place_in_model

CHANGE_LATER = (
    "change it after optimizer.step(): model.update() there, if a method of the model does it, or "
    "with torch.no_grad(): p.copy_(...)",
    "where nn.Embedding(max_norm=...) does it: divide the results of one without max_norm by their norms",
)


def data_as_detached(model: nn.Module) -> AbstractContextManager[None]:
    """A context for a pass of ``model`` in which ``x.data`` is ``x.detach()``: the same values in the same
    memory, without a gradient, so that a write to it is one to ``x``, and is refused where that is. To
    replace ``x.data`` is refused, for buffers by the pass itself (``attributes``). Tensors of another,
    parallel model may move meanwhile: the lending of one that is garbage ends when Python collects it."""
    original: Any = Tensor.data

    def get(tensor: Tensor) -> Tensor:
        return original.__get__(tensor) if _is_by_runtime() else tensor.detach()

    def replace(tensor: Tensor, value: Tensor) -> None:
        if _is_by_runtime():
            original.__set__(tensor, value)
            return
        if _is_same(tensor, value):  # as in x.data *= 2, which has written to x by now
            return
        for name, parameter in model.named_parameters():
            if parameter is tensor:
                raise changed_parameter(name, str(place_in_model()))
        if not any(buffer is tensor for buffer in model.buffers()):
            raise TraceError(
                "the model cannot be traced",
                got="x.data = ..., which no program can follow",
                where=str(place_in_model()),
                hint=("x.detach().copy_(value)", "x = value, if what is made of x is made later"),
            )
        original.__set__(tensor, value)

    return patched(Tensor, "data", property(get, replace))


def _is_by_runtime() -> bool:
    """Whether the caller's caller is mixmesh's own code, and not the model's."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("mixmesh.runtime.")


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.dtype == other.dtype
        and (one.shape, one.stride(), one.storage_offset())
        == (other.shape, other.stride(), other.storage_offset())
    )


def changed_parameter(name: str, where: str) -> TraceError:
    return TraceError(
        f"the model's forward pass changes a parameter: {name}",
        expected="changes of buffers only",
        where=where,
        hint=CHANGE_LATER,
    )
