"""Runs one instruction on one rank: the ATen operator on local shards, with the sizes in its arguments made
local.

If the plain operator on the shards would not give the local result (a mean over a cut dim, a look-up in a
piece of a vocabulary, random numbers), one of ``kernels`` takes its place; if a rank's piece is empty,
``empty`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from ..frontend.trace.dtypes import TORCH_DTYPE
from ..frontend.trace.schema import overload
from ..lang.ir import Arg, DType, Instruction, Program, Ref, Shard, TensorType, map_refs, shard_sizes
from ..lang.ir.samples import draws_numbers
from ..lang.rules import RULES, LocalCall, call_of
from .direct import Slot, direct_call
from .empty import empty_op, is_empty
from .kernels import KERNELS, PlainOp, Site, seeded_kernel
from .random import RandomPolicy
from .window import Window

LocalOp = Callable[..., tuple[torch.Tensor | None, ...]]


@cache
def aten_op(name: str) -> torch._ops.OpOverload:
    """The callable of ``aten.add.Tensor`` or ``aten.linear`` (the default overload)."""
    if name == "aten.view":
        return torch.ops.aten.reshape.default  # a shard need not be contiguous
    return overload(name)


def local_call(program: Program, i: Instruction, rank: int, window: Window | None = None) -> LocalCall:
    """The call of ``i`` on ``rank``, for all of its samples or those of a window."""
    call = call_of(i, program.types)
    in_types = [program.types[name] for name in i.inputs]
    cutting = window if window is not None and window.samples.hold(i) else None

    def shape(t: TensorType) -> tuple[int, ...]:
        value, placement = t.value, t.placement
        if not isinstance(placement, Shard):
            return value.shape
        if cutting is not None:
            size = cutting.length(t)
        else:
            size = shard_sizes(value.shape[placement.dim], program.cut_by(t), placement.unit)[rank]
        return value.shape[: placement.dim] + (size,) + value.shape[placement.dim + 1 :]

    return LocalCall(
        call,
        tuple(t.placement for t in in_types),
        tuple(t.placement for t in i.types),
        tuple(map(shape, in_types)),
        tuple(map(shape, i.types)),
    )


def local_op(
    program: Program,
    i: Instruction,
    rank: int,
    device: torch.device,
    random: RandomPolicy,
    window: Window | None = None,
) -> LocalOp:
    """A function of the local inputs (in the order of ``i.inputs``) that returns the local results."""
    local = local_call(program, i, rank, window)
    if is_empty(local):
        return empty_op(local, [TORCH_DTYPE[t.dtype] for t in local.call.outputs], device)
    kernel = KERNELS.get(i.op) or (seeded_kernel if draws_numbers(i.op) else None)
    site = Site(program, i, rank, device, random, local, lambda: plain_op(i, local, device), window)
    special = kernel(site) if kernel else None
    return special or plain_op(i, local, device)


def plain_op(i: Instruction, local: LocalCall, device: torch.device) -> PlainOp:
    """The ATen operator itself, its arguments made local by the rule."""
    rule = RULES.get(i.op)
    args, kwargs = i.args, i.kwargs
    if rule is not None and rule.local is not None:
        args, kwargs = rule.local(local)
    slots: list[int] = []

    def slot(_: Ref) -> Slot:
        slots.append(len(slots))
        return Slot(slots[-1])

    args_template = tuple(to_torch(map_refs(a, slot)) for a in args)
    kwargs_template = {k: to_torch(map_refs(v, slot)) for k, v in kwargs}
    if not slots:
        kwargs_template["device"] = device
    returns_list = len(i.results) > 1 or i.op in RETURNS_LIST
    return direct_call(aten_op(i.op), args_template, kwargs_template, returns_list)


RETURNS_LIST = frozenset(
    {
        "aten.split.Tensor", "aten.split_with_sizes", "aten.unsafe_split.Tensor", "aten.chunk",
        "aten.unbind.int", "aten.meshgrid", "aten.meshgrid.indexing",
    }
)  # fmt: skip


def to_torch(arg: Arg):
    if isinstance(arg, DType):
        return TORCH_DTYPE[arg.name]
    if isinstance(arg, tuple):
        return [to_torch(a) for a in arg]
    return arg
