"""The schemas of operators: their overloads by name, and a normal form of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ...errors import UnsupportedOp
from ...lang import operators  # noqa: F401  registers our own
from ...lang.ir import Arg, DType, Node, refs

# arguments that affect where and how a result lies in memory, but not its value; they are None in a graph
PLACEMENT_ARGS = frozenset({"device", "layout", "memory_format", "pin_memory", "non_blocking"})
# arguments that only choose a kernel
KERNEL_ARGS = frozenset({"cudnn_enable", "cudnn_enabled"})


# operators with other effects than computing their results: files, threads, other processes
NO_COMPUTATIONS = frozenset(
    """
    _c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test c10d cuda debug_mode_ops
    debugprims export fsdp higher_order inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn prim prims
    profiler quantization quantized rngprims sparse static_runtime streams symm_mem xnnpack
    """.split()
)


def is_by_element(op: torch._ops.OpOverload) -> bool:
    """Whether an operator computes each element by itself, and draws no number."""
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


@cache
def overload(op: str) -> torch._ops.OpOverload:
    """Maps ``aten.linear`` to ``torch.ops.aten.linear.default``. Raises UnsupportedOp for an unknown name.

    A name may come from any file. So it is looked up in the dispatcher's list, not among attributes, and it
    must name a function of tensors that neither writes to its arguments nor reads a file.
    """
    namespace, _, rest = op.partition(".")
    qualified = f"{namespace}::{rest}"
    if namespace in NO_COMPUTATIONS or not _is_registered(qualified):
        raise UnsupportedOp(f"PyTorch has no operator {op}")
    name, _, suffix = rest.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), suffix or "default")
    if not isinstance(operator, torch._ops.OpOverload) or not _is_computation(operator._schema):
        raise UnsupportedOp(
            f"{op} has effects beside its results",
            expected="an operator that neither writes to its arguments nor reads a file",
        )
    return operator


def _is_registered(qualified: str) -> bool:
    """Whether the dispatcher's list has a name. The list is long, and is read again only for a name that was
    not there, which a library may have registered since."""
    if qualified not in _registered:
        _registered.update(torch._C._dispatch_get_all_op_names())
    return qualified in _registered


_registered: set[str] = set()


def _is_computation(schema: torch._C.FunctionSchema) -> bool:
    """Whether an operator has no side effects. An operator with strings but no tensors among its arguments
    would read a file."""
    kinds = [str(a.type) for a in schema.arguments]
    return not schema.is_mutable and ("str" not in kinds or any("Tensor" in kind for kind in kinds))


def ctc_loss_on_meta(
    log_probs: torch.Tensor, targets: Any, input_lengths: Any, target_lengths: Any,
    blank: int = 0, reduction: int = 1, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    return log_probs.new_empty(log_probs.shape[1:2] if reduction == 0 else ())


# operators for which PyTorch has no kernel on meta tensors
ON_META = {"aten.ctc_loss.Tensor": ctc_loss_on_meta}


def on_meta(op: str) -> Callable[..., Any]:
    """The function that infers the types of an operator's results, from meta tensors. Raises
    UnsupportedOp."""
    return ON_META.get(op) or overload(op)


def op_name(target: torch._ops.OpOverload) -> str:
    """The name of an overload in a graph."""
    namespace, name = target._schema.name.split("::")
    suffix = "" if target._overloadname == "default" else f".{target._overloadname}"
    return f"{namespace}.{name}{suffix}"


def bound(node: Node) -> dict[str, Arg]:
    """The arguments of ``node`` by their names in the schema, including defaults."""
    out: dict[str, Arg] = {}
    named = dict(node.kwargs)
    for position, argument in enumerate(overload(node.op)._schema.arguments):
        if not argument.kwarg_only and position < len(node.args):
            out[argument.name] = node.args[position]
        else:
            out[argument.name] = named.get(argument.name, _default(argument))
    return out


def changed(node: Node, **changes: Arg) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """The positional and keyword arguments of ``node`` after some of them were changed."""
    arguments = bound(node) | changes
    schema = overload(node.op)._schema.arguments
    args = tuple(arguments[a.name] for a in schema if not a.kwarg_only)
    return args, {a.name: arguments[a.name] for a in schema if a.kwarg_only}


def normalise(node: Node) -> Node:
    """Passes arguments by position where the schema allows it, and drops defaults, both trailing and by
    name."""
    if "." not in node.op:
        return node
    schema = overload(node.op)._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    kwargs = {k: v for k, v in node.kwargs if k not in PLACEMENT_ARGS and v is not None}
    args = _by_position(node, positional, kwargs)
    defaults = {a.name for a in schema if a.name in kwargs and _is_default(a, kwargs[a.name])}
    if "dtype" not in kwargs and _is_factory(node, schema):
        kwargs["dtype"] = _result_dtype(node)
    kept = tuple(sorted((k, v) for k, v in kwargs.items() if k not in defaults))
    return replace(node, args=tuple(args), kwargs=kept)


def _by_position(node: Node, positional: list, kwargs: dict[str, Arg]) -> list[Arg]:
    """The arguments by position, without defaults at the end; named ones are moved here out of ``kwargs``."""
    args = list(node.args)
    for argument in positional[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            break
        args.append(kwargs.pop(argument.name, _default(argument)))
    for i, argument in enumerate(positional[: len(args)]):
        if argument.name in KERNEL_ARGS or argument.name in PLACEMENT_ARGS:
            args[i] = _default(argument)
    while args and _is_default(positional[len(args) - 1], args[-1]):
        args.pop()
    return args


def _default(argument: Any) -> Arg:
    value = argument.default_value if argument.has_default_value() else None
    return tuple(value) if isinstance(value, list) else value


def _is_default(argument: Any, value: Arg) -> bool:
    if not argument.has_default_value() or any(refs(value)):
        return False
    if argument.name in KERNEL_ARGS or argument.name in PLACEMENT_ARGS:
        return True
    default = _default(argument)
    return type(default) is type(value) and default == value


def _is_factory(node: Node, schema: Any) -> bool:
    """Whether an operator has no tensors among its arguments, so that the default dtype decides its own."""
    return any(a.name == "dtype" for a in schema) and not any(refs(node.args))


def _result_dtype(node: Node) -> Arg:
    return DType(node.types[0].dtype)
