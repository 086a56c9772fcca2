"""The number of tensors that an optimizer holds for each parameter."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerStates(NamedTuple):
    """Tensors of a parameter's size that its optimizer holds. ``kept`` live from one step to the next (Adam:
    2). ``beside`` are workspace while a parameter is stepped; a GPU steps all parameters at once, and needs
    the workspace of all of them. A fused kernel needs none."""

    kept: int
    beside: int = 0


ADAM = OptimizerStates(2)  # for a job that names no optimizer: ``runtime.optimizers`` uses a fused one
