"""The number of tensors that an optimizer holds for each parameter."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerStates(NamedTuple):
    """The numbers of tensors of a parameter's size that its optimizer holds: ``kept`` from one step to the
    next (Adam: 2; in 8 bits 0.5), ``beside`` as workspace while a parameter is stepped. A GPU steps all
    parameters at once and needs the workspace of all of them. A fused kernel needs none."""

    kept: float
    beside: int = 0


# assumed for a job that names no optimizer: ``runtime.optimizers`` then uses a fused one
ADAM = OptimizerStates(2)
