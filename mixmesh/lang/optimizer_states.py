"""The tensors that an optimizer holds for every parameter, each of its size."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerStates(NamedTuple):
    """``kept`` are held from one step to the next (Adam: 2). ``beside`` are made while one parameter steps;
    on a GPU, which steps all parameters at once, one of all. A fused kernel makes none."""

    kept: int
    beside: int = 0


ADAM = OptimizerStates(2)  # for a job that names no optimizer, fused as ``runtime.optimizers`` has it
