"""Sufficient factor broadcasting: every rank computes a weight gradient for itself from gathered factors.

The weight gradient of ``y = linear(x, w)`` is ``gy^T x``, a sum over the samples of all ranks. If the two
factors are smaller than the weight, gathering them costs less than summing the gradient (Xie et al., UAI'16;
HAP, EuroSys'24; TAG, TPDS'23). An instruction with the attribute ``sfb`` does that; the gradient of its
weight is then R, and in no bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MixmeshError
from ..lang.ir import Instruction, Program, Replicate, Shard, print_instruction
from .collectives import Handle, all_gather, then
from .comm import Channel, Comm
from .layout import Layout, layout


def is_sfb(i: Instruction) -> bool:
    return bool(i.attr("sfb", False))


def summed_by_sfb(program: Program, param: str) -> bool:
    """Whether SFB computes the gradient of a replicated parameter, so that it needs no all_reduce."""
    users = [i for i in program.instructions if param in i.inputs]
    by_sfb = [i for i in users if is_sfb(i)]
    if by_sfb and len(by_sfb) < len(users):
        other = next(i for i in users if not is_sfb(i))
        raise MixmeshError(
            f"%{param} is used with sfb and without: a part of its gradient would be summed, the rest not",
            where=f"{print_instruction(other)}  {other.location}".rstrip(),
            hint="put sfb on all instructions that use a parameter, or on none",
        )
    return bool(by_sfb)


class Factor:
    """A factor that ``users`` products of one backward pass need; the first of them gathers it."""

    def __init__(self) -> None:
        self.users = 0
        self._handle: Handle | None = None

    def gather(self, start: Callable[[], Handle]) -> Handle:
        handle = self._handle or start()
        self.users -= 1
        self._handle = handle if self.users else None
        return handle


class Factors:
    """The factors of the running forward pass, by the tensor itself."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ref[Tensor], weakref.ref[Factor]]] = {}

    def of(self, name: str, x: Tensor) -> Factor:
        tensor: Tensor | None = None
        factor: Factor | None = None
        if name in self._known:
            tensor_ref, factor_ref = self._known[name]
            tensor, factor = tensor_ref(), factor_ref()
        if tensor is not x or factor is None:
            factor = Factor()
            self._known[name] = weakref.ref(x), weakref.ref(factor)
        factor.users += 1
        return factor


def sfb_op(
    program: Program, i: Instruction, comm: Comm, sink, factors: Factors
) -> Callable[..., tuple[Tensor]]:
    """The local operator of an ``aten.linear`` with ``sfb``: x S(dim) of a batch dim, weight and bias R.

    Its first argument is the list of tokens for the loss (see ``redistribute``), before its inputs.
    ``factors`` are those of the whole program.
    """
    x_type, *others = (program.types[name] for name in i.inputs)
    x = layout(program, x_type)
    dim_ok = isinstance(x.placement, Shard) and x.dim < len(x_type.value.shape) - 1
    replicated = all(
        isinstance(t.placement, Replicate) and program.participants(t) == x.ranks for t in others
    ) and all(program.producers[name].op == "param" for name in i.inputs[1:])
    if i.op != "aten.linear" or not dim_ok or not replicated:
        raise MixmeshError(
            "sfb does not fit this instruction",
            expected="aten.linear of x S(batch dim) and a parameter R on the same ranks",
            got=", ".join(str(program.types[name]) for name in i.inputs),
            where=f"{print_instruction(i)}  {i.location}".rstrip(),
        )
    channel = comm.channel(x.ranks, i, part="factors")

    def run(tokens: list[Tensor], x_local: Tensor, weight: Tensor, bias: Tensor | None = None):
        if not torch.is_grad_enabled():
            return (torch.nn.functional.linear(x_local, weight, bias),)
        # the parameters bypass autograd: their gradients arrive later, through the sink
        needs_grad = weight.requires_grad or (bias is not None and bias.requires_grad)
        anchor = torch.empty(0, device=x_local.device, requires_grad=needs_grad)
        factor = factors.of(i.inputs[0], x_local) if weight.requires_grad else None
        y, token = _Sfb.apply(anchor, x_local, (weight, bias), channel, x, sink, factor)
        tokens.append(token)
        return (y,)

    return run


class _Sfb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, x: Tensor, params, channel: Channel, held: Layout, sink, factor: Factor | None):
        weight, bias = params
        ctx.save_for_backward(x)
        ctx.params, ctx.channel, ctx.held, ctx.sink, ctx.factor = params, channel, held, sink, factor
        y = torch.nn.functional.linear(x, weight.detach(), None if bias is None else bias.detach())
        return y, anchor.new_empty(0)

    @staticmethod
    def backward(ctx, gy: Tensor, _token):
        (x,) = ctx.saved_tensors
        weight, bias = ctx.params
        sizes = [ctx.held.sizes[rank] for rank in ctx.channel.ranks]
        whole_gy = all_gather.start(ctx.channel, gy, sizes, ctx.held.dim)
        if weight.requires_grad:
            whole_x = ctx.factor.gather(lambda: all_gather.start(ctx.channel, x, sizes, ctx.held.dim))
            gathered = sum(sizes) * (gy.nbytes + x.nbytes) // max(ctx.held.sizes[ctx.channel.comm.rank], 1)
            ctx.sink(weight, then(_weight_gradient, whole_gy, whole_x), gathered)
        if bias is not None and bias.requires_grad:
            ctx.sink(bias, then(lambda g: g.flatten(0, -2).sum(0), whole_gy), 0)
        gx = gy @ weight.detach() if ctx.needs_input_grad[1] else None
        return None, gx, None, None, None, None, None


def _weight_gradient(gy: Tensor, x: Tensor) -> Tensor:
    return gy.flatten(0, -2).T @ x.flatten(0, -2)
