"""A module computed in float64 without knowing it: tensors that say float32 and hold float64.

Converting a module by ``.double()`` would change what it does: a cast in its forward rounds again, autocast
passes float64 by, and branches and constants that follow a dtype (``torch.finfo(x.dtype).min``) take another
way. So the module keeps its dtypes, for Python and for autograd, and every operator that it calls runs on
the float64 numbers behind them, as ``programs.in_float64`` has it for a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from ...errors import VerificationError
from .draws import draw_alike
from .products import IN_FLOAT64

WIDE_DTYPE = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip
BITS = (torch.ops.aten.view.dtype,)  # reads numbers as other numbers: what they are depends on their dtype


class Wide(Tensor):
    """A tensor of ``claimed`` dtype to all who ask, whose numbers are ``exact``, in float64 or complex128."""

    exact: Tensor

    @staticmethod
    def __new__(cls, exact: Tensor, claimed: torch.dtype) -> Wide:
        wrapped = Tensor._make_wrapper_subclass(
            cls,
            exact.size(),
            strides=exact.stride(),
            storage_offset=exact.storage_offset(),
            dtype=claimed,
            device=exact.device,
        )
        wrapped.exact = exact
        return wrapped

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run_in_float64(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Wide({self.exact!r}, {self.dtype})"


class Widened(TorchDispatchMode):
    """Within it, operators on tensors of narrow dtypes run in float64, and draw numbers by shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run_in_float64(func, args, kwargs or {})


def widen(t: Tensor) -> Tensor:
    """The tensor with its numbers in float64, claiming its dtype; a copy, if its dtype is not narrow."""
    t = t.detach()
    if t.dtype not in WIDE_DTYPE:
        return t.clone()
    return Wide(t.to(WIDE_DTYPE[t.dtype]), t.dtype)


def exact(t: Tensor) -> Tensor:
    """The numbers behind a tensor."""
    return t.exact if isinstance(t, Wide) else t


def run_in_float64(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operator on the numbers behind its arguments; its results claim the dtype that they would have."""
    if func in BITS:
        raise VerificationError(
            "the module reads the bits of a tensor, which float64 numbers do not have",
            got=f"x.view({args[1]})",
            hint="x.to(dtype), where numbers are meant",
        )
    inputs = pytree.tree_leaves((args, kwargs))
    claimed = _claimed([x for x in inputs if isinstance(x, Tensor)], inputs)
    wide_args, wide_kwargs = pytree.tree_map(_wide_argument, (args, kwargs))
    with default_dtype(torch.float64):
        out = draw_alike(IN_FLOAT64.get(func, func), wide_args, wide_kwargs)
    narrow = lambda x: _claim(x, claimed)  # noqa: E731
    out = pytree.tree_map(narrow, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _wide_argument(x: Any) -> Any:
    if isinstance(x, Wide):
        return x.exact
    if isinstance(x, torch.dtype):
        return WIDE_DTYPE.get(x, x)
    if isinstance(x, Tensor) and x.dtype in WIDE_DTYPE:
        return x.detach().to(WIDE_DTYPE[x.dtype])
    return x


def _claim(x: Any, claimed: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    x = x.resolve_conj().resolve_neg() if x.layout is torch.strided else x.to_dense()
    if x.dtype == torch.complex128 and claimed != torch.float64:
        return Wide(x, torch.complex64)
    if x.dtype == torch.float64 and claimed in WIDE_DTYPE:
        return Wide(x, claimed)
    return x


def _claimed(tensors: Iterable[Tensor], inputs: Iterable[Any]) -> torch.dtype:
    """The floating dtype of an operator's results: the one asked for, or that of its inputs, of which those
    without dims give way to others."""
    asked = [x for x in inputs if isinstance(x, torch.dtype) and (x.is_floating_point or x.is_complex)]
    if asked:
        return _real(asked[0])
    floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    floats = [t for t in floats if t.ndim] or floats
    if not floats:
        return torch.get_default_dtype()
    dtype = _real(floats[0].dtype)
    for t in floats[1:]:
        dtype = torch.promote_types(dtype, _real(t.dtype))
    return dtype


def _real(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it a quotient of integers, and what is made without a dtype, is of this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
