"""Gradients of inputs: for a batch that the script made with another model, or whose gradient it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import PARTIAL, REPLICATE, Program, Shard, has_gradient
from .batches import input_words
from .comm import Comm
from .layout import Layout, layout
from .redistribute import between
from .shards import Stored

Wanted = tuple[str, ...]  # names of inputs whose gradient is wanted


def wanted_gradients(program: Program, tensors: Mapping[str, Tensor]) -> Wanted:
    """The inputs whose gradient a call needs."""
    if not torch.is_grad_enabled():
        return ()
    names = (i.args[0] for i in program.batch_inputs)
    return tuple(name for name in names if name in tensors and tensors[name].requires_grad)


def with_input_gradients(program: Program, wanted: Wanted) -> Program:
    """``program`` with a gradient for these inputs."""
    instructions = tuple(
        replace(i, kwargs=(("grad", True),)) if i.op == "input" and i.args[0] in wanted else i
        for i in program.instructions
    )
    return replace(program, instructions=instructions)


def check_gradients_flow(program: Program) -> None:
    """Raises InputError for an input with a gradient that the program stops everywhere. A forward that does
    so only for an input without one (``if not x.requires_grad: x = x.detach()``) was traced with such."""
    grads = program.requires_grad
    stopped = [i for i in program.batch_inputs if has_gradient(i) and i.result not in grads]
    if not stopped:
        return
    names = ", ".join(input_words(str(i.args[0])) for i in stopped)
    raise InputError(
        "the model stops the gradient of an input that has one",
        expected="an input without requires_grad, or a model through which its gradient flows",
        got=f"requires_grad of {names}",
        hint=(
            "x.detach() in the loop, where forward detaches it anyway",
            "where forward asks whether x.requires_grad, and detaches it if not: x.requires_grad_() alone, "
            "as the model was planned for an x without",
        ),
    )


def no_gradient_in_micro_steps(wanted: Wanted) -> InputError:
    """The error for plans whose backward pass runs before the script's own ``backward``."""
    return InputError(
        "this plan runs in micro-batches, which give no gradient of an input",
        expected="inputs without requires_grad",
        got=f"an input with it: {', '.join(wanted)}",
        hint=(
            'mixmesh.prepare(..., planner="ddp-tuned"), which has no micro-batches',
            "x.detach() if its gradient is not needed",
        ),
    )


@dataclass(frozen=True, eq=False)
class Given:
    """An input with a gradient: the script's own tensor, the ``leaf`` on which the program runs (None on a
    rank that holds no part of it), and how the whole is held."""

    outer: Tensor
    leaf: Tensor | None
    held: Stored
    comm: Comm

    def gradient(self) -> Tensor:
        """The gradient of the script's input after the program's backward pass: for the whole batch, or for
        this rank's own rows. Collective."""
        leaf, comm, layout_ = self.leaf, self.comm, self.held.held
        mine = None
        if leaf is not None:
            mine, leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, None
        if isinstance(layout_.placement, Shard):
            shape = layout_.shape(self.held.shape, comm.rank)
            piece = torch.zeros(shape, dtype=self.held.dtype, device=comm.device) if mine is None else mine
            whole = self.held.whole(piece, comm)
        else:
            addends, everywhere = Layout(PARTIAL, layout_.ranks), Layout(REPLICATE, comm.everyone)
            what = f"gradient of the input {self.held.name}"
            how = between(comm, what, self.held.shape, self.held.dtype, addends, everywhere)
            summed = how.forward(mine)
            assert isinstance(summed, Tensor)  # every rank holds it
            piece = whole = summed
        if not self.outer.numel():  # a rank without samples
            return torch.zeros_like(self.outer)
        gradient_part = whole if self.outer.shape == whole.shape else piece
        return gradient_part.to(self.outer.device)


def given_inputs(
    program: Program,
    tensors: Mapping[str, Tensor],
    inputs: dict[str, Tensor],
    wanted: Sequence[str],
    comm: Comm,
) -> tuple[dict[str, Tensor], list[Given]]:
    """The pieces of ``inputs``, made leaves of autograd if ``wanted``, and an entry for each wanted input."""
    replaced, entries = dict(inputs), []
    for i in program.batch_inputs:
        name = i.args[0]
        if name not in wanted:
            continue
        if name in inputs:
            replaced[name] = inputs[name].detach().requires_grad_()
        held = Stored(name, i.type.value.shape, TORCH_DTYPE[i.type.value.dtype], layout(program, i.type))
        entries.append(Given(tensors[name], replaced.get(name), held, comm))
    return {name: x if name in wanted else x.detach() for name, x in replaced.items()}, entries
