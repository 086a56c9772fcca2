"""Checks programs (is this one valid?) and plans (do they belong to this cluster and this model?).

A program that a person has edited is checked before anything runs. Invariants of a valid program:

- a value is defined once, before it is used;
- the shard owners of a replicated parameter (ZeRO-1/2) hold it;
- a parameter, buffer or input is held as R or S, a constant as R;
- an operator's placements are a strategy of its rule; without a rule all are R;
- the values of one operator are held by the same ranks, and its shards are cut by the same shares;
- a redistribution keeps the value type, and its name follows from its placements;
- a rematerialised computation reads the same values and draws the same random numbers in its second run;
- results have the types that PyTorch gives them;
- the loss is a floating-point scalar held as P(sum).
"""

from __future__ import annotations

from ..ir import Program
from ..plan_file import Plan
from .placements import check_names, check_placements, check_placements_only
from .plans import check_plan

__all__ = ["check_loaded", "check_placements", "check_plan", "check_program"]


def check_loaded(plan: Plan, where: str = "") -> None:
    """Checks a plan's program and micro-batches before it is shown or simulated. An unedited program has
    PyTorch's own types; only edited ones are compared with PyTorch, which takes long to import. Raises
    VerificationError or PlanError."""
    if plan.edited:
        check_program(plan.program, where)
    else:
        check_placements(plan.program, where)
    check_plan(plan, where=where)


def check_program(program: Program, where: str = "") -> None:
    """Raises VerificationError naming the first line that is not valid; ``where`` names the file."""
    from .types import check_types  # imports torch

    check_names(program, where)
    check_types(program, where)  # first, because a wrong shape fits no rule either
    check_placements_only(program, where)
