"""Calls of ATen operators through PyTorch's own bindings.

They parse their arguments about a microsecond faster than ``torch.ops``. A step issues hundreds of operators,
and where a GPU waits for its host that time is the step's. An operator without a row is called through
``torch.ops``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..frontend.trace.schema import op_name

NN = torch._C._nn
BINDINGS: dict[str, Callable[..., Tensor]] = {
    "aten.add.Tensor": torch.add,
    "aten.addmm": torch.addmm,
    "aten.bmm": torch.bmm,
    "aten.conv2d": torch.conv2d,
    "aten.div.Tensor": torch.div,
    "aten.embedding": torch.embedding,
    "aten.gelu": NN.gelu,
    "aten.layer_norm": torch.layer_norm,
    "aten.linear": NN.linear,
    "aten.matmul": torch.matmul,
    "aten.max_pool2d": torch.max_pool2d,
    "aten.mean.dim": torch.mean,
    "aten.mm": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.neg": torch.neg,
    "aten.permute": torch.permute,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.relu": torch.relu,
    "aten.reshape": torch.reshape,
    "aten.rsqrt": torch.rsqrt,
    "aten.scaled_dot_product_attention": NN.scaled_dot_product_attention,
    "aten.select.int": torch.select,
    "aten.sigmoid": torch.sigmoid,
    "aten.silu": NN.silu,
    "aten.softmax.int": torch.softmax,
    "aten.sub.Tensor": torch.sub,
    "aten.tanh": torch.tanh,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze": torch.unsqueeze,
}


class Slot(int):
    """The place of a tensor among the arguments of an operator: its number among the tensors."""


@dataclass(frozen=True)
class DirectCall:
    """An operator whose arguments are tensors (``Slot``), lists of them, and plain values. It returns one
    tensor, or with ``returns_list`` several."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    returns_list: bool = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        out = self._run(*tensors)
        return tuple(out) if self.returns_list else (out,)

    @cached_property
    def _run(self) -> Callable[..., Any]:
        text, bound = self.code("op", "tensors[{}]".format)
        return eval(f"lambda *tensors: {text}", {"torch": torch, **bound})

    def code(self, name: str, tensor: Callable[[int], str]) -> tuple[str, dict[str, Any]]:
        """The call of this operator as ``name``, with its plain values written out and the code of each
        ``tensor`` by its number; and the objects that it names besides ``torch``."""
        bound: dict[str, Any] = {name: self.function}

        def text(value: object, of: str) -> str:
            if isinstance(value, Slot):
                return tensor(value)
            if isinstance(value, list | tuple):
                return f"[{', '.join(text(x, f'{of}_{n}') for n, x in enumerate(value))}]"
            if is_literal(value):
                return repr(value)
            bound[of] = value
            return of

        args = [text(x, f"{name}_{n}") for n, x in enumerate(self.args)]
        options = [f"{key}={text(x, f'{name}_{key}')}" for key, x in self.options.items()]
        return f"{name}({', '.join(args + options)})", bound


def is_literal(value: object) -> bool:
    """Whether ``repr`` gives the code of a value, where ``torch`` is known."""
    if value is None or isinstance(value, torch.dtype) or type(value) in (bool, int, str):
        return True
    return type(value) is float and math.isfinite(value)


def direct_call(
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    returns_list: bool = False,
) -> DirectCall:
    """The call of an operator, by its binding if there is one."""
    name = op_name(operator)
    if name == "aten._to_copy" and set(options) == {"dtype"}:
        return DirectCall(torch.Tensor.to, (*args, options["dtype"]), {"copy": True})
    return DirectCall(BINDINGS.get(name, operator), args, options, returns_list)
