"""Offers only plans whose programs the checker accepts, because it checks them again before they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import PlanError, VerificationError
from ..lang.check import check_program
from ..lang.plan_file import Plan, accumulation
from .proposal import Proposal


def offer(
    wanted: Sequence[Proposal], instead: Sequence[Proposal], plan_of: Callable[[Proposal], Plan]
) -> list[Plan]:
    """The plans of the wanted proposals that are valid, or the first valid one of ``instead`` if none is. A
    warning of the first plan names the planners whose programs were left out.

    Raises the checker's VerificationError or PlanError if nothing is valid.
    """
    plans: list[Plan] = []
    faults: dict[str, VerificationError | PlanError] = {}
    for n, proposal in enumerate((*wanted, *instead)):
        if plans and n >= len(wanted):
            break
        plan = plan_of(proposal)
        try:
            check_program(plan.program)
            accumulation(plan)
        except (VerificationError, PlanError) as error:
            faults.setdefault(proposal.planner, error)
            continue
        plans.append(plan)
    if not plans:
        raise next(iter(faults.values()))
    left_out = tuple(
        f"a program of the planner {planner} is not valid and was left out, which is a fault of mixmesh: "
        f"{error.message}"
        for planner, error in faults.items()
    )
    return [replace(plans[0], warnings=(*plans[0].warnings, *left_out)), *plans[1:]]
