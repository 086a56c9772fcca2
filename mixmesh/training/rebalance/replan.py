"""Plans another form of plan if other shares alone do not suffice: with the observed speeds of the devices,
continuing from a checkpoint.

Planning takes a while, during which no rank trains, so it is done only if it can pay. While a step is about
as far from perfect balance as the first plan was, no other form of plan is expected to be better; if it is
further, another plan is expected to restore that distance and no more. Shares that leave a device without
samples are always compared with a plan without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...base.units import plural
from ...cluster import Cluster
from ...cost import Profile
from ...errors import Infeasible, InputError
from ...lang.ir import shard_sizes
from ...lang.plan_file import Plan
from .decide import Decision, Terms, decide
from .solve import Solver, samples_of_batch

PlanFor = Callable[[Cluster, Profile | None], Plan]


@dataclass(frozen=True)
class OtherPlan:
    """A plan of another form, and the corrected cluster and profile that it was made for."""

    plan: Plan
    cluster: Cluster
    profile: Profile | None


class Replanner:
    """Plans again on the first rank, by calling ``plan_for``, which is expected to take ``planning_s``
    seconds the first time, and later as long as it took last."""

    def __init__(self, plan_for: PlanFor, planning_s: float) -> None:
        self._plan_for, self._planning_s = plan_for, planning_s

    def better(
        self,
        solver: Solver,
        plan: Plan,
        own_s: Sequence[float],
        in_place: Decision,
        restart_s: float,
        least_gain: float,
        is_other_form: Callable[[Plan], bool],
    ) -> tuple[Decision, OtherPlan] | None:
        """The decision for another plan that gains more than ``in_place`` does, after a restart of
        ``restart_s``; None if there is no such plan (``is_other_form``), or if looking for one does not pay.
        """
        if not has_room(plan):
            return None
        terms = in_place.terms
        step_s = terms.new_step_s if in_place.is_applied else terms.step_s
        before_s, restored_s = solver.balanced_step_s(plan, own_s)
        hoped_s = terms.step_s * restored_s / before_s
        hoped = replace(
            terms, step_s=step_s, new_step_s=hoped_s, pause_s=self._planning_s + restart_s, problem=""
        )
        if not decide(hoped, least_gain).is_applied and not leaves_out(plan, in_place):
            return None
        costs = solver.costs(plan, own_s)
        started = time.perf_counter()
        try:
            candidate = self._plan_for(costs.cluster, costs.profile)
        except (Infeasible, InputError):  # nothing else fits: the training goes on as it is
            return None
        self._planning_s = time.perf_counter() - started
        candidate = replace(candidate, devices=plan.devices)
        if not is_other_form(candidate):
            return None
        decision = decide(
            replace(
                terms,
                new_step_s=terms.step_s * candidate.predicted_step_s / before_s,
                pause_s=restart_s,
                problem="",
                other_plan=f"{form_text(plan)} -> {form_text(candidate)}",
            ),
            least_gain,
        )
        if not decision.is_applied or gained_s(decision.terms) <= (
            gained_s(terms) if in_place.is_applied else 0.0
        ):
            return None
        return decision, OtherPlan(candidate, costs.cluster, costs.profile)


def has_room(plan: Plan) -> bool:
    """Whether the first device, which also trains, has room for two more copies of the job's model: to plan
    again, it is made again and traced. True if the plan does not know its memory."""
    if not plan.usable_bytes or not plan.predicted_peak_memory_bytes:
        return True
    model_bytes = sum(i.type.value.size_bytes for i in plan.program.params)
    return 2 * model_bytes <= plan.usable_bytes[0] - plan.predicted_peak_memory_bytes[0]


def leaves_out(plan: Plan, in_place: Decision) -> bool:
    """Whether the new shares give no sample to a device that has some now: a plan without it sums over fewer
    devices."""
    samples, terms = samples_of_batch(plan.program), in_place.terms
    pairs = zip(shard_sizes(samples, terms.shares), shard_sizes(samples, terms.new_shares))
    return in_place.is_applied and any(before and not after for before, after in pairs)


def form_text(plan: Plan) -> str:
    """The planner of a plan, and how many devices take part: ``ddp-tuned on 2 of 3 devices``."""
    program = plan.program
    ranks = {r for i in program.instructions for t in i.types for r in program.participants(t)}
    return f"{plan.planner} on {len(ranks)} of {plural(program.world_size, 'device')}"


def gained_s(terms: Terms) -> float:
    """The seconds by which the rest of the run becomes shorter, including the pause."""
    return (terms.step_s - terms.new_step_s) * terms.steps_left - terms.pause_s
