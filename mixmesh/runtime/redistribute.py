"""Redistribution of one tensor between layouts, differentiable.

The gradient of ``src -> dst`` is the redistribution ``dual(dst) -> dual(src)`` (see ``ir.dual``), so there is
one routine for both directions.

Ranks may have different graphs around a redistribution: one that only sends has no output at all. Yet all
must run the backward collectives, in the same order. Two things ensure it. Every differentiable
redistribution returns, along with its result, an empty *token* that goes into the loss, so its backward runs
on every rank that communicates. And among the nodes that are ready, the autograd engine takes the one created
last; since all nodes above it in the graph are created later still, the backward collectives run in exactly
the reverse order of the program on each rank.

A redistribution is started at its place in the program and awaited at its first use. The backward pass
reverses this: the gradient's redistribution starts where the forward one was awaited, and is awaited where
the forward one was started. It therefore overlaps with the gradients of the computations in between, and with
weight gradients that wait for it to start (``wgrad``). A parameter's redistribution is not awaited in the
backward pass at all: its gradient is handed to a sink, which adds it to the parameter on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..base.lazy import lazy
from ..cost.outline import purpose_of
from ..errors import MixmeshError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import Instruction, Partial, Program
from . import collectives
from .collectives import Handle, done, then
from .comm import Comm
from .layout import Layout, Step, layout, route


@dataclass(frozen=True)
class Redistribution:
    """One rank's part of a redistribution. ``forward`` and ``backward`` map local tensors; None is the tensor
    of a rank outside of the layout."""

    comm: Comm
    instruction: Instruction | str
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Layout
    dst: Layout
    algorithm: str | None = None
    gradient_algorithm: str | None = None
    direct: bool = False  # whether sums are one-shot
    purpose: str = "data"  # the purpose of the process group
    sent: Callable[[], object] | None = None  # called when its gradient is on its way

    @lazy
    def communicates(self) -> bool:
        """Whether this rank takes part in a collective of the forward or the backward."""
        rank = self.comm.rank
        steps = route(self.src, self.dst) + route(self.dst.dual, self.src.dual)
        return any(rank in step.ranks for step in steps)

    @lazy
    def takes_part(self) -> bool:
        return self.comm.rank in self.src.ranks or self.comm.rank in self.dst.ranks

    def forward(self, x: Tensor | None) -> Tensor | None:
        """Runs the redistribution without autograd."""
        return self.begin(x).wait()

    def begin(self, x: Tensor | None) -> Handle[Tensor | None]:
        """Starts the redistribution without autograd, and returns a handle on its result."""
        return self._along(route(self.src, self.dst), x, self.algorithm)

    def backward(self, gradient: Tensor | None) -> Handle:
        steps = route(self.dst.dual, self.src.dual)
        if gradient is None and self.comm.rank in self.dst.ranks:
            gradient = self._zeros(self.dst)
        return self._along(steps, gradient, self.gradient_algorithm, "gradient")

    def start(self, x: Tensor | None) -> Pending:
        """Starts the redistribution with autograd."""
        if torch.is_grad_enabled() and not self.communicates:
            return Pending(self, x, done(self._local(x)))
        handle = self.begin(None if x is None else x.detach())
        if x is None or not (torch.is_grad_enabled() and x.requires_grad):
            return Pending(self, x, handle)
        gradient = _Gradient()
        return Pending(self, x, handle, gradient, _Leave.apply(x, gradient))

    def apply(self, x: Tensor | None, tokens: list[Tensor]) -> Tensor | None:
        """Starts and finishes at once, with autograd. Appends to ``tokens`` those that must go into the
        loss."""
        return self.start(x).finish(tokens)

    def _local(self, x: Tensor | None) -> Tensor | None:
        """Redistributes without communication, by plain differentiable operators."""
        for step in route(self.src, self.dst):
            x = self._step(step, x, None).wait()
        return x

    def _along(
        self, steps: tuple[Step, ...], x: Tensor | None, algorithm: str | None, part: str = ""
    ) -> Handle:
        """Runs all steps, at most one of which communicates; later ones run on its arrival."""
        handle: Handle = done(x)
        for step in steps:
            if self.comm.rank in step.ranks:
                handle = self._step(step, handle.wait(), algorithm, part)
            else:
                handle = then(lambda x, step=step: self._step(step, x, algorithm, part).wait(), handle)
        return handle

    def _zeros(self, held: Layout) -> Tensor:
        shape = held.shape(self.shape, self.comm.rank)
        return torch.zeros(shape, dtype=self.dtype, device=self.comm.device)

    def _step(self, step: Step, x: Tensor | None, algorithm: str | None, part: str = "") -> Handle:
        rank, src, dst = self.comm.rank, step.src, step.dst
        if step.ranks and rank in step.ranks:
            if x is None:
                x = self._zeros(src)
            handle = self._collective(step, x, algorithm, part)
            return handle if rank in dst.ranks else then(lambda _: None, handle)
        if rank not in dst.ranks:
            return done(None)
        match step.kind:
            case "slice":
                assert x is not None  # ranks of the result held it before
                return done(x.narrow(dst.dim, *dst.piece(rank)))
            case "as_partial":
                keeper = min(set(src.ranks) & set(dst.ranks))
                return done(x if rank == keeper else self._zeros(dst))
            case "pad":
                assert x is not None  # see above
                offset, size = src.piece(rank)
                behind = self.shape[src.dim] - offset - size
                pads = (0, 0) * (len(self.shape) - 1 - src.dim) + (offset, behind)
                return done(torch.nn.functional.pad(x, pads))
            case "fold":
                return done(self._zeros(dst) if x is None else x)
        return done(x)  # spread to ranks that already hold it

    def _collective(self, step: Step, x: Tensor, algorithm: str | None, part: str) -> Handle[Tensor]:
        src, dst = step.src, step.dst
        channel = self.comm.channel(step.ranks, self.instruction, self.purpose, part)
        of = lambda held: [held.sizes[rank] for rank in step.ranks]  # noqa: E731
        match step.kind:
            case "gather":
                return collectives.all_gather.start(channel, x, of(src), src.dim, algorithm=algorithm)
            case "scatter":
                return collectives.reduce_scatter.start(channel, x, of(dst), dst.dim, algorithm=algorithm)
            case "reduce":
                assert isinstance(src.placement, Partial)
                return collectives.all_reduce.start(channel, x, src.placement.op, direct=self.direct)
            case "exchange":
                return collectives.all_to_all.start(channel, x, src.dim, of(src), dst.dim, of(dst))
            case "spread":
                return collectives.broadcast.start(channel, x, src.ranks[0])
            case "fold":
                return collectives.reduce.start(channel, x, dst.ranks[0])
        raise AssertionError(step.kind)


# adds a handle's gradient to a parameter once it has arrived; the number is the bytes of its buffers, and the
# parameter is None on a rank without a share
Sink = Callable[[Tensor | None, Handle, int], None]


@dataclass(eq=False)
class _Gradient:
    """The gradient of a redistribution on its way back, shared by the two nodes of autograd that need it."""

    handle: Handle | None = None

    def wait(self) -> Tensor | None:
        handle, self.handle = self.handle, None
        assert handle is not None  # the backward of the end node has set it
        return handle.wait()


@dataclass(frozen=True)
class Pending:
    """A differentiable redistribution under way. ``left`` is an empty tensor: to autograd, it is the result
    of the start, and its backward awaits ``gradient``. None if no gradient goes back there."""

    how: Redistribution
    x: Tensor | None
    handle: Handle
    gradient: _Gradient | None = None
    left: Tensor | None = None

    def finish(self, tokens: list[Tensor], sink: Sink | None = None) -> Tensor | None:
        """Waits for the result. Appends to ``tokens`` those that must go into the loss. With a ``sink``,
        ``x`` is a parameter whose gradient goes there."""
        if not torch.is_grad_enabled() or not self.how.communicates:
            return self.handle.wait()
        anchor = torch.empty(0, device=self.how.comm.device, requires_grad=True)
        left = None if sink is not None else self.left
        y, token = _Arrive.apply(anchor, left, self, sink)
        tokens.append(token)
        return y


def memory_of(x: Tensor) -> int:
    """The address of the memory that a tensor is a view of."""
    return x.untyped_storage().data_ptr()


def own_memory(lent: int, x: Tensor | None) -> Tensor | None:
    """``x``, copied if it lies in memory that is ``lent``. Autograd passes one tensor to several nodes as
    their gradient: a parameter that kept it would change together with the others."""
    return x.clone() if x is not None and memory_of(x) == lent else x


class _Leave(torch.autograd.Function):
    """The start of a redistribution: does nothing in the forward pass, and waits for the gradient in the
    backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, gradient: _Gradient):
        ctx.gradient = gradient
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient.wait(), None


class _Arrive(torch.autograd.Function):
    """The end of a redistribution; its backward starts the redistribution of the gradient."""

    @staticmethod
    def forward(ctx, anchor, left: Tensor | None, pending: Pending, sink: Sink | None):
        ctx.how, ctx.sink = pending.how, sink
        ctx.parameter = pending.x if sink is not None else None
        ctx.gradient = pending.gradient if left is not None else None
        ctx.set_materialize_grads(False)
        y = pending.handle.wait()
        if y is not None and pending.x is not None and y.data_ptr() == pending.x.data_ptr():
            y = y.view_as(y)
        return y, anchor.new_empty(0)

    @staticmethod
    def backward(ctx, gradient: Tensor | None, _token):
        handle = ctx.how.backward(gradient)
        if ctx.how.sent is not None:
            ctx.how.sent()
        if ctx.sink is not None:
            handle = handle if gradient is None else then(partial(own_memory, memory_of(gradient)), handle)
            ctx.sink(ctx.parameter, handle, math.prod(ctx.how.shape) * ctx.how.dtype.itemsize)
        elif ctx.gradient is not None:
            ctx.gradient.handle = handle
            return None, torch.empty(0, dtype=ctx.how.dtype, device=ctx.how.comm.device), None, None
        else:
            handle.wait()
        return None, None, None, None


def bind(program: Program, instruction: Instruction, comm: Comm) -> Redistribution:
    """The redistribution of an instruction. It uses the attributes ``algorithm`` and
    ``gradient_algorithm``."""
    (name,) = instruction.inputs
    src = layout(program, program.types[name])
    dst = layout(program, instruction.type)
    if isinstance(src.placement, Partial) and src.placement.op != "sum":
        if instruction.op != "all_reduce" or instruction.result in program.requires_grad:
            raise MixmeshError(
                f"{instruction.op} of {src.placement} has no gradient",
                expected="a P(sum), or an all_reduce of a value that needs no gradient",
                where=f"{instruction.op}  {instruction.location}",
            )
    return Redistribution(
        comm,
        instruction,
        instruction.type.value.shape,
        TORCH_DTYPE[instruction.type.value.dtype],
        src,
        dst,
        instruction.attr("algorithm"),
        instruction.attr("gradient_algorithm"),
        program.sums_directly(instruction.type.value.size_bytes),
        purpose_of(program, instruction),
    )


def between(comm: Comm, what: str, x_shape, dtype, src: Layout, dst: Layout) -> Redistribution:
    """A redistribution that is not an instruction of a program, for instance of a parameter into a
    checkpoint."""
    return Redistribution(comm, what, tuple(x_shape), dtype, src, dst)
