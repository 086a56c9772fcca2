"""The number of tensors that an optimizer holds for each parameter, and the gradients of passes before."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Earlier(IntEnum):
    """The gradients of earlier passes that a backward pass finds, for the same optimizer step."""

    NOTHING = 0
    # unsummed where ranks sum them, as ``no_sync`` leaves them: those of this pass are added one by one
    ADDENDS = 1
    SUMS = 2  # summed: gradients of this pass are added when all are complete


class OptimizerStates(NamedTuple):
    """The numbers of tensors of a parameter's size that its optimizer holds: ``kept`` from one step to the
    next (Adam: 2; in 8 bits 0.5), ``beside`` as workspace while a parameter is stepped. A GPU steps all
    parameters at once and needs the workspace of all of them. A fused kernel needs none. Beside them, the
    gradients of passes before, if the optimizer makes a step after several (``earlier``)."""

    kept: float
    beside: int = 0
    earlier: int = Earlier.NOTHING


# assumed for a job that names no optimizer: ``runtime.optimizers`` then uses a fused one
ADAM = OptimizerStates(2)
