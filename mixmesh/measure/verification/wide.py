"""Runs a module in float64 without changing its dtypes: its tensors claim float32 and hold float64.

``.double()`` would change what a module does: a cast in its forward would still round, autocast ignores
float64, and branches and constants that depend on a dtype (``torch.finfo(x.dtype).min``) would differ. So the
module keeps its dtypes, for Python and for autograd, and every operator runs on the float64 numbers behind
them, like ``programs.in_float64`` for a program.
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
from . import draws
from .draws import draw_alike
from .products import IN_FLOAT64

WIDE_DTYPE = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip
BITS = (torch.ops.aten.view.dtype,)  # operators that read the bits of numbers, which depend on the dtype

WITHIN = (draws.__file__, __file__)  # our files whose frames lie within the module's
OF_VALUES = "out of bounds"  # in PyTorch's errors for indices that are too large


class Wide(Tensor):
    """A tensor that claims a dtype but has the numbers of ``exact``, in float64 or complex128."""

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

    # PyTorch's stubs describe neither how subclasses disable functions nor how they dispatch
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return run_in_float64(func, args, kwargs or {})

    # the stubs misread the name of the keyword of PyTorch's own
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Wide({self.exact!r}, {self.dtype})"


class Widened(TorchDispatchMode):
    """A context in which operators on narrow dtypes run in float64, and random numbers depend on the
    shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run_in_float64(func, args, kwargs or {})


def widen(t: Tensor) -> Tensor:
    """Converts a tensor to one that has its numbers in float64 and claims its dtype. A tensor whose dtype is
    not narrow is copied."""
    t = t.detach()
    if t.dtype not in WIDE_DTYPE:
        return t.clone()
    return Wide(t.to(WIDE_DTYPE[t.dtype]), t.dtype)


def exact(t: Tensor) -> Tensor:
    """The numbers behind a tensor."""
    return t.exact if isinstance(t, Wide) else t


def run_in_float64(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the numbers behind its arguments; its results claim the dtype that they would
    have. Raises VerificationError for an operator that PyTorch does not have in float64."""
    if func in BITS:
        raise VerificationError(
            "the module reads the bits of a tensor, which float64 numbers do not have",
            got=f"x.view({args[1]})",
            hint="x.to(dtype), where numbers are meant",
        )
    inputs = pytree.tree_leaves((args, kwargs))
    claimed = _claimed([x for x in inputs if isinstance(x, Tensor)], inputs)
    wide_args, wide_kwargs = pytree.tree_map(_wide_argument, (args, kwargs))
    try:
        with default_dtype(torch.float64):
            out = draw_alike(IN_FLOAT64.get(func, func), wide_args, wide_kwargs)
    except RuntimeError as error:
        if OF_VALUES in str(error):  # no matter in which dtype
            raise
        raise VerificationError(
            f"{func} does not run in float64, in which plans are verified",
            expected="operators that PyTorch has in float64 too",
            got=str(error).splitlines()[0],
            hint="verify the model without this operator",
        ) from error
    if torch.Tag.inplace_view in func.tags and not isinstance(args[0], Wide):
        return out  # its shape was changed already, and would be changed again below
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
    if x._is_zerotensor():  # the second derivative of sgn: zeros without memory, which operators cannot read
        x = torch.zeros_like(x)
    x = x.resolve_conj().resolve_neg() if x.layout is torch.strided else x.to_dense()
    if x.dtype == torch.complex128 and claimed != torch.float64:
        return Wide(x, torch.complex64)
    if x.dtype == torch.float64 and claimed in WIDE_DTYPE:
        return Wide(x, claimed)
    return x


def _claimed(tensors: Iterable[Tensor], inputs: Iterable[Any]) -> torch.dtype:
    """The floating dtype of an operator's results: that of its dtype argument, or else that of its inputs,
    among which those with dims take precedence."""
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
    """A context in which quotients of integers, and tensors made without a dtype, have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
