"""Models whose loss the script computes outside of them: their outputs are whole on every rank, with
gradients.

Every rank computes the same loss from the same whole outputs, so each has the whole gradient of every output,
and takes its own rows of it into the program. These gradients are all that the program sees of the loss: any
loss, from any number of calls, works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from ..frontend.trace.outputs import NOTHING
from ..lang.ir import Program, Returned, Shard, has_gradient, outputs_of
from .agreement import facts_of_values
from .comm import Comm
from .outputs import Kept, Output, trees


@dataclass(frozen=True)
class Outside:
    """The return value of a model without a loss: its outputs, in the form in which the model ``returned``
    them."""

    returned: Returned
    kept: tuple[Kept, ...]

    @classmethod
    def of(cls, plan: Any, comm: Comm) -> Outside | None:
        """The state for a model whose loss is computed outside; None for a model that computes its loss
        itself."""
        if isinstance(plan, Program) or plan.returned.has_loss:
            return None
        outputs = outputs_of(plan.program).values()
        flowing = frozenset(i.inputs[0] for i in outputs if has_gradient(i))
        for i in outputs:
            if i.inputs[0] in _could_flow(plan.program) - flowing:
                raise _without_gradient(i.args[0])
        return cls(plan.returned, tuple(Kept.of(plan.program, i, flowing) for i in outputs))

    def pieces(self, shown: Mapping[str, list[Tensor]], comm: Comm) -> list[Tensor]:
        """This rank's piece of every output, empty if it has none."""
        return [k.shown(shown.get(k.name, []), comm) for k in self.kept]

    def whole(self, pieces: Sequence[Tensor], comm: Comm, *, is_compared: bool) -> Any:
        """All outputs, whole, in the form in which the model returns them. Collective. If ``is_compared``,
        gradients that differ between ranks are refused."""
        values = {
            k.name: _Whole.apply(piece, k, comm, is_compared)
            for k, piece in zip(self.kept, pieces, strict=True)
        }
        if self.returned.names == ("",):
            return values[""]
        nothing = {name.removesuffix(NOTHING): None for name in self.returned.names if name.endswith(NOTHING)}
        order = [name.removesuffix(NOTHING) for name in self.returned.names]
        named = trees({name: (values | nothing)[name] for name in order})
        if self.returned.is_tuple and all(name.isdigit() for name in named):
            return tuple(named.values())
        return Output(named, self.returned)


def with_output_gradients(program: Program) -> Program:
    """``program`` with a gradient for every output that depends on what has one: on inputs too, which had
    none when the program was planned."""
    flowing = _could_flow(program)
    instructions = tuple(
        replace(i, kwargs=tuple({**dict(i.kwargs), "grad": True}.items()))
        if i.op == "output" and i.inputs[0] in flowing
        else i
        for i in program.instructions
    )
    return replace(program, instructions=instructions)


def _could_flow(program: Program) -> frozenset[str]:
    """The values that would have a gradient if all outputs did."""
    marked = (replace(i, kwargs=(("grad", True),)) if i.op == "output" else i for i in program.instructions)
    return replace(program, instructions=tuple(marked)).requires_grad


def _without_gradient(name: str) -> PlanError:
    return PlanError(
        f"the plan has no gradient for the model's output {name}".rstrip(),
        expected="output(..., grad=true) for every output that depends on a trainable parameter",
        got="an output that is shown alone",
        hint="plan again: the loss was to be computed outside of the model",
    )


class _Whole(torch.autograd.Function):
    """Forward: gathers a value whose pieces are on several ranks. Backward: this rank's piece of the
    gradient. If every rank holds the value, only the first one takes the gradient, because gradients of such
    values are summed."""

    @staticmethod
    def forward(ctx, piece: Tensor, kept: Kept, comm: Comm, is_compared: bool):
        ctx.kept, ctx.comm, ctx.is_compared, ctx.piece_shape = kept, comm, is_compared, piece.shape
        whole = kept.held.whole(piece, comm)
        if whole.untyped_storage()._cdata == piece.untyped_storage()._cdata:
            return whole.clone()
        # gathered rows are a view of a buffer, and autograd refuses a loop that changes such a view in place
        storage, shape, stride = whole.untyped_storage(), whole.shape, whole.stride()
        return whole.new_empty(0).set_(storage, whole.storage_offset(), shape, stride)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        held, rank = ctx.kept.held.held, ctx.comm.rank
        if ctx.is_compared:
            name = f"the gradient of the model's output {ctx.kept.name}".rstrip()
            with ctx.comm.call("backward of outputs"):
                ctx.comm.compare(lambda: facts_of_values(name, gradient))
        if isinstance(held.placement, Shard):
            mine = gradient.narrow(held.dim, *held.piece(rank))
        elif rank == held.ranks[0]:
            mine = gradient
        else:
            mine = gradient.new_zeros(ctx.piece_shape)
        return mine, None, None, None
