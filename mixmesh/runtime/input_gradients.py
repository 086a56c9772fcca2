"""Gradients of inputs: for a batch that the script made with another model, or whose gradient it asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    """``program`` with a gradient for those of these inputs that it does not detach."""
    every = _with_gradients(program, wanted)
    flowing = [i.args[0] for i in every.batch_inputs if i.result in every.requires_grad]
    return _with_gradients(program, flowing)


def _with_gradients(program: Program, names: Collection[str]) -> Program:
    instructions = tuple(
        replace(i, kwargs=(("grad", True),)) if i.op == "input" and i.args[0] in names else i
        for i in program.instructions
    )
    return replace(program, instructions=instructions)


def question_about_gradients(wanted: Wanted, line: str) -> InputError:
    """The error for inputs with a gradient of a model whose ``line`` asks whether they have one."""
    return InputError(
        "the model asks whether its input has a gradient, and was planned for an input without",
        expected="inputs without requires_grad",
        got=f"requires_grad of {', '.join(map(input_words, wanted))}",
        where=line,
        hint=(
            "in forward, x.requires_grad_() or x.detach() without the question",
            "checkpoint(..., use_reentrant=False), if it is a checkpoint that asks",
            "in the loop, x.detach() if its gradient is not needed",
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
    comm: Comm,
) -> tuple[dict[str, Tensor], list[Given]]:
    """The pieces of ``inputs``, made leaves of autograd where the program has a gradient for them, and an
    entry for each of those."""
    replaced, entries = dict(inputs), []
    of_leaves = [i for i in program.batch_inputs if has_gradient(i)]
    for i in of_leaves:
        name = i.args[0]
        if name in inputs:
            replaced[name] = inputs[name].detach().requires_grad_()
        held = Stored(name, i.type.value.shape, TORCH_DTYPE[i.type.value.dtype], layout(program, i.type))
        entries.append(Given(tensors[name], replaced.get(name), held, comm))
    leaves = {i.args[0] for i in of_leaves}
    return {name: x if name in leaves else x.detach() for name, x in replaced.items()}, entries
