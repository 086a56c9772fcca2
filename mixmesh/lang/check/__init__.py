"""Layer 3: is this program a program, and is this plan for this cluster and this model?

A program that a person has edited is checked before anything runs. Invariants of a valid program:

- a value is defined once, before it is used;
- the owners of a replicated parameter (ZeRO-1/2) hold it;
- a parameter, buffer or input is held as R or S, a constant as R;
- an operator's placements are a strategy of its rule; without a rule all are R;
- the values of one operator are held by the same ranks, its shards cut by the same shares;
- a redistribution keeps the value type, and its name is the one that its placements have;
- what is computed again in the backward pass are computations that read and draw the same then;
- results have the types that PyTorch gives them;
- the loss is a floating-point scalar held as P(sum).
"""

from __future__ import annotations

from ..ir import Program
from ..plan_file import Plan
from .placements import check_names, check_placements, check_placements_of_known
from .plans import check_plan

__all__ = ["check_loaded", "check_placements", "check_plan", "check_program"]


def check_loaded(plan: Plan, where: str = "") -> None:
    """Checks a plan's program for reading and simulating: without PyTorch where the program is as mixmesh
    wrote it, as its types are then PyTorch's own. Raises VerificationError."""
    if plan.edited:
        check_program(plan.program, where)
    else:
        check_placements(plan.program, where)


def check_program(program: Program, where: str = "") -> None:
    """Raises VerificationError naming the first line that is not valid; ``where`` names the file."""
    from .types import check_types  # torch

    check_names(program, where)
    check_types(program, where)  # first: a wrong shape also fits no rule
    check_placements_of_known(program, where)
