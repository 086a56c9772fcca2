"""A rank's part of a batch: cut from a whole batch, or checked if it already is the part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import Instruction, Program, Shard, TensorType
from .executor import local_piece
from .layout import layout
from .streams import copied


def local_inputs(
    program: Program, tensors: Mapping[str, Tensor], rank: int, device: torch.device
) -> dict[str, Tensor]:
    """This rank's piece of every input. Raises InputError for a missing one or a wrong shape or dtype."""
    return {
        i.args[0]: local_input(program, i, tensors.get(i.args[0]), rank, device)
        for i in program.batch_inputs
        if rank in program.participants(i.type)
    }


def input_words(name: str) -> str:
    """Names an input in an error: by its argument, or by its position if it has no name."""
    return f"input {int(name) + 1} of the model" if name.isdigit() else name


def other_dtype(name: str, planned: torch.dtype, got: torch.dtype) -> InputError:
    """The error for an input whose dtype is not that of the first batch."""
    return InputError(
        f"{input_words(name)} has another dtype than planned",
        expected=f"{planned}, as in the first batch",
        got=f"{got}",
        hint=f".to({planned}) before the model is called, or prepare it with a batch of {got}",
    )


def dealt_type(i: Instruction, shape: tuple[int, ...]) -> TensorType:
    """The type of an input in a batch of another size, as loaders deal its rows out."""
    t, placement = i.type, i.type.placement
    if isinstance(placement, Shard):
        placement = placement.dealt(shape[placement.dim])
    return replace(t, value=replace(t.value, shape=shape), placement=placement)


def local_input(
    program: Program, i: Instruction, got: Tensor | None, rank: int, device: torch.device | None
) -> Tensor:
    name, value = i.args[0], i.type.value
    if got is None:
        raise InputError(f"the batch has no tensor {name!r}", expected=f"{name} {value}")
    dtype = TORCH_DTYPE[value.dtype]
    mine = program.local_shape(i.result, rank)
    if got.dtype != dtype:
        raise other_dtype(name, dtype, got.dtype)
    if tuple(got.shape) == value.shape:
        got = local_piece(got, layout(program, i.type), rank)
    elif tuple(got.shape) != mine:
        raise InputError(
            f"{input_words(name)} is neither a whole batch nor rank {rank}'s part of one",
            expected=f"{list(value.shape)} (whole) or {list(mine or ())} (rank {rank}'s part)",
            got=f"{list(got.shape)}",
        )
    return got if device is None else copied(got, device)


def batch_dim_input(program: Program) -> Instruction | None:
    """An input cut along dim 0, which determines how samples are divided; None if all inputs are
    replicated."""
    for i in program.batch_inputs:
        if isinstance(i.type.placement, Shard) and i.type.placement.dim == 0:
            return i
    return None
