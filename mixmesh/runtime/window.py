"""A micro-batch's view of a program: the local sizes and offsets of values that hold samples.

A program is compiled once per number of samples; their position in the batch is looked up when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..lang.ir import Instruction, Program, Samples, TensorType, local_kind
from .random import RandomPolicy


@dataclass(frozen=True, eq=False)
class Window:
    """The ``size`` samples of a rank in a micro-batch; ``place`` gives their position in the batch at run
    time."""

    samples: Samples
    size: int
    place: RandomPolicy

    def length(self, t: TensorType) -> int:
        """The number of elements along the dim that is cut."""
        return t.value.shape[t.shard.dim] // self.samples.batch_size * self.size

    def start(self, t: TensorType) -> int:
        """The position of the first element in the whole tensor."""
        return t.value.shape[t.shard.dim] // self.samples.batch_size * self.place.first_sample


def local_move(program: Program, i: Instruction, rank: int, window: Window) -> Callable | None:
    """A function that performs a redistribution without communication, for this window; None for one that
    does not depend on the window."""
    source, kind = program.types[i.inputs[0]], local_kind(program, i)
    if kind == "local_slice" and i.result in window.samples.values:
        dim = i.type.shard.dim
        return lambda x: (x.narrow(dim, window.start(i.type), window.length(i.type)),)
    if kind == "pad_partial" and i.inputs[0] in window.samples.values:
        dim, shape = source.shard.dim, source.value.shape

        def pad(x: Tensor):
            offset = window.start(source)
            behind = shape[dim] - offset - window.length(source)
            return (torch.nn.functional.pad(x, (0, 0) * (len(shape) - 1 - dim) + (offset, behind)),)

        return pad
    if kind == "as_partial" and i.inputs[0] not in window.samples.values:
        keeper = min({*program.participants(source)} & {*program.participants(i.type)})
        # an addend of the step rather than of a micro-batch counts once
        return lambda x: (x if rank == keeper and window.place.micro_step == 0 else torch.zeros_like(x),)
    return None
