"""Owned parameters: replicated in use, their gradients and optimizer state cut between owners (ZeRO-1/2).

A ``param`` with the attributes ``owned="z"`` (a ratio of the program, zeros allowed) and ``stage`` is held
whole by all ranks of its type. Its summed gradient and what the optimizer keeps of it are ``S(0)@z``: rank
j owns ``shard_sizes(shape[0], z)[j]`` rows. Rows are not divided, so a parameter with fewer rows than
owners belongs to those with the largest shares; one without dims cannot be owned and stays replicated.
"""

from __future__ import annotations

from .instruction import Instruction
from .program import Program
from .types import TensorType

STAGES = (1, 2)


def owned_type(program: Program, param: Instruction) -> TensorType | None:
    """How the gradient and the optimizer state of a parameter are held, if not as the parameter is.

    None for a parameter that is not owned, or that needs no owner: it gets no gradient, or one rank alone
    holds it.
    """
    return program.owned.get(param.result)


def stage_of(param: Instruction) -> int:
    """1: the whole gradient is kept until the step's last backward pass. 2: it is summed in every one."""
    return param.attr("stage", 2)
