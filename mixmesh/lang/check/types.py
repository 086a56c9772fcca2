"""Checks a program's types: runs every operator on meta tensors at global shapes and compares."""

from __future__ import annotations

from functools import partial

import torch

from ...errors import UnsupportedOp
from ...frontend.trace import DTYPE_NAME, TORCH_DTYPE, on_meta, overload
from ..ir import Arg, DType, Instruction, Program, Ref, ValueType
from ..ir.printing import print_arg
from .failure import invalid
from .placements import check_same_value

WITHOUT_VALUES = "with Meta tensors"  # PyTorch's words for an operator that has to have values: fake_quantize
Signature = tuple[ValueType | None, ...]


def check_types(program: Program, where: str = "") -> None:
    """Raises VerificationError naming the first line whose printed types differ from those of its results."""
    seen: dict[tuple, Signature] = {}
    for i in program.instructions:
        if i.op == "const":
            _check_const(program, i, where)
        if i.is_redistribution:
            check_same_value(program, i, partial(invalid, program, i, where))
        if i.is_leaf or i.is_redistribution or i.is_sink:
            continue
        key = (i.op, _typed(i.args, program), tuple((k, _typed(v, program)) for k, v in i.kwargs))
        if key not in seen:
            seen[key] = _results(program, i, where)
        result_types = seen[key]
        if len(result_types) != len(i.types):
            many = f"{len(i.types)} result types"
            raise invalid(
                program, i, where, f"{i.op} gives {len(result_types)} results", str(len(result_types)), many
            )
        for name, printed, actual in zip(i.results, i.types, result_types):
            # a meta kernel may not know the size of a result that is not used
            if name is not None and actual is not None and actual != printed.value:
                message = f"{i.op} gives another type"
                raise invalid(program, i, where, message, str(actual), str(printed.value))


def _check_const(program: Program, i: Instruction, where: str) -> None:
    got, want = len(i.args[0]), i.type.value.num_elements
    if got != want:
        raise invalid(program, i, where, f"{got} numbers for {i.type.value}", str(want), str(got))


def _typed(arg: Arg, program: Program) -> object:
    """An argument whose names are replaced by types, so that calls with equal results compare equal."""
    if isinstance(arg, Ref):
        return program.types[arg.name].value
    if isinstance(arg, tuple):
        return tuple(_typed(a, program) for a in arg)
    return (type(arg), arg)


def _results(program: Program, i: Instruction, where: str) -> Signature:
    try:
        op = torch.ops.aten.reshape.default if i.op == "aten.view" else on_meta(i.op)
    except UnsupportedOp as error:
        raise invalid(program, i, where, error.message, "an operator of this PyTorch", i.op) from None
    args = [_meta(a, program) for a in i.args]
    kwargs = {k: _meta(v, program) for k, v in i.kwargs}
    if any(a.name == "device" for a in overload(i.op)._schema.arguments):
        kwargs["device"] = "meta"
    try:
        with torch.no_grad():
            out = op(*args, **kwargs)
    except Exception as error:
        if isinstance(error, NotImplementedError) and WITHOUT_VALUES in str(error):
            return (None,) * len(i.results)
        reason = str(error).strip().splitlines()
        got = ", ".join(print_arg(a) if not isinstance(a, Ref) else str(program.types[a.name].value)
                        for a in i.args)  # fmt: skip
        message = f"{i.op} does not take these arguments: {reason[0] if reason else type(error).__name__}"
        raise invalid(program, i, where, message, "", got) from None
    outs = tuple(out) if isinstance(out, tuple | list) else (out,)
    return tuple(_type_of(x) for x in outs)


def _type_of(x: object) -> ValueType | None:
    if not isinstance(x, torch.Tensor):
        return None
    return ValueType(DTYPE_NAME[x.dtype], tuple(x.shape)) if x.dtype in DTYPE_NAME else None


def _meta(arg: Arg, program: Program) -> object:
    match arg:
        case Ref():
            t = program.types[arg.name].value
            return torch.empty(t.shape, dtype=TORCH_DTYPE[t.dtype], device="meta")
        case DType():
            return TORCH_DTYPE[arg.name]
        case tuple():
            return [_meta(a, program) for a in arg]
    return arg
