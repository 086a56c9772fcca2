"""The model that was handed to ``parallelize``: emptied, and unusable until it is loaded again.

Under some plans its tensors would be the trained ones, under others their initial values. One rule holds for
all plans: the original's parameters and buffers are empty, and using one raises an error that says where its
values are. ``original.load_state_dict(state)`` makes it an ordinary model again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

from ..base.callers import line_of_script
from ..errors import InputError
from .left_tensors import left_shown
from .shard_numbers import Off

_KNOWN = frozenset(
    """shape dtype device layout is_meta is_cuda is_sparse is_leaf requires_grad ndim itemsize nbytes
    _backward_hooks _post_accumulate_grad_hooks""".split()
)
_ASKED = frozenset(
    "size dim numel nelement is_floating_point is_complex element_size __len__ data_ptr is_contiguous".split()
)


class TakenOver(torch.Tensor):
    """A parameter or buffer of a model that ``parallelize`` took over: its shape, and no values."""

    was: type
    heir: weakref.ref[Tensor]  # the tensor that the parallel model shows

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = func.__name__
        attribute = func.__self__.__name__ if name == "__get__" else ""
        with Off():
            if attribute in _KNOWN or name in _ASKED:
                return func(*args, **(kwargs or {}))
            if name == "__repr__":
                return f"TakenOver({list(args[0].shape)}, by mixmesh.parallelize)"
            if name == "copy_" and isinstance(args[0], TakenOver):
                give_back(args[0])
                return func(*args, **(kwargs or {}))
        raise InputError(
            "this model was taken over by parallelize: its own parameters hold no values",
            expected="the model that parallelize returned",
            got=f"{attribute or name} of a parameter or buffer of the original",
            where=line_of_script(),
            hint=(
                "model, optimizer = mixmesh.parallelize(model, optimizer, plan)",
                "make further optimizers after that, of parameters of the model that is returned",
                "with model.whole() as m: ...  # the original with whole weights, within the block",
                "in a Trainer: with mixmesh.whole(trainer.model_wrapped) as m: ..., on every rank",
                "original.load_state_dict(model.full_state_dict()) makes the original whole again",
            ),
        )


def take_over(x: Tensor, heir: Tensor) -> None:
    """Empties ``x``, whose values are in ``heir`` from now on."""
    with _on_real_tensors():
        was, device = type(x), x.device
        shape = x.shape
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(x)
        stride = x.stride() if is_dense else torch.empty(shape, device="meta").stride()
        x.grad = None
        x.data = x.new_empty(0)  # frees it before more memory is requested
        x.data = _without_memory(shape, stride, x.dtype, device)
        is_parameter = isinstance(x, nn.Parameter)
        x.__class__ = TakenOver
        assert isinstance(x, TakenOver)
        x.was, x.heir = was, weakref.ref(heir)
        if is_parameter:
            x._is_param = True


def give_back(x: TakenOver) -> None:
    """Makes ``x`` an ordinary tensor again, with undefined values."""
    with _on_real_tensors():
        shape, stride = x.shape, x.stride()
        x.__class__ = x.was
        for name in ("_is_param", "was", "heir"):  # these would be pickled with the tensor
            x.__dict__.pop(name, None)
        x.data = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """A context in which ``model`` can be traced on fake tensors, which need no values."""
    lent = [x for x in (*model.parameters(), *model.buffers()) if isinstance(x, TakenOver)]
    for x in lent:
        x.__class__ = x.was
    try:
        with left_shown(model):
            yield
    finally:
        for x in lent:
            x.__class__ = TakenOver


@contextmanager
def _on_real_tensors() -> Iterator[None]:
    """A context that hides operations from a running trace (of another model, for instance), which would
    record them and replace memory by fake tensors."""
    with torch._C.DisableTorchFunction(), dispatch._disable_current_modes(), torch.no_grad():
        yield


def _without_memory(shape, stride, dtype: torch.dtype, device: torch.device) -> Tensor:
    out = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    out.untyped_storage().resize_(0)
    return out
