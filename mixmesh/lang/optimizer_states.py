"""The number of tensors that an optimizer holds for each parameter, and the gradients of passes before."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ..errors import InputError


class Earlier(IntEnum):
    """What a backward pass finds of the gradients of earlier passes for the same optimizer step."""

    NOTHING = 0
    # unsummed where ranks sum them, as ``no_sync`` leaves them: those of this pass are added one by one
    ADDENDS = 1
    SUMS = 2  # those of this pass are added when all are complete


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

EARLIER_BY_NAME = {"": Earlier.NOTHING, "no_sync": Earlier.ADDENDS, "every pass": Earlier.SUMS}


def earlier_gradients(accumulate: str) -> int:
    """The gradients that ``accumulate``, an argument of ``prepare`` and ``plan``, has a plan count. Raises
    InputError for any other."""
    if accumulate not in EARLIER_BY_NAME:
        raise InputError(
            f"unknown accumulation {accumulate!r}",
            expected='"no_sync", "every pass", or "" for a loop with one backward pass per optimizer step',
            got=repr(accumulate),
            hint='accumulate="no_sync" if passes but the last are within model.no_sync(), else "every pass"',
        )
    return int(EARLIER_BY_NAME[accumulate])
