"""Shard owners (ZeRO-1/2): parameters are replicated, their gradients and optimizer state cut between owners.

A ``param`` with the attributes ``owned="z"`` (a ratio of the program, zeros allowed) and ``stage`` is held
whole by all ranks of its type. Its reduced gradient and its optimizer state are ``S(0)@z``: rank j owns
``shard_sizes(shape[0], z)[j]`` rows. Rows are not divided, so a parameter with fewer rows than owners belongs
to the owners with the largest shares; a parameter without dims cannot be owned and stays replicated.
"""

from __future__ import annotations

from .instruction import Instruction
from .program import Program
from .types import TensorType

STAGES = (1, 2)


def owned_type(program: Program, param: Instruction) -> TensorType | None:
    """The type of a parameter's gradient and optimizer state if it differs from the parameter's own.

    None for a parameter without owners, and for one that needs none because it gets no gradient or a single
    rank holds it.
    """
    return program.owned.get(param.result)


def stage_of(param: Instruction) -> int:
    """The ZeRO stage of an owned parameter. In stage 1 its whole gradient is kept until the last backward
    pass of the step, in stage 2 every backward pass reduces it to its owners."""
    return param.attr("stage", 2)
