"""Finds the plan that is fastest when tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ...cluster import Cluster
from ...cost import CostModel, Profile
from ...errors import CollectiveError, MixmeshError
from ...frontend.job import needs_whole_parameters, optimizer_states
from ...frontend.trace import Traced, trace
from ...lang.optimizer_states import OptimizerStates
from ...lang.plan_file import Plan
from ...planner import make_plans
from ...runtime.comm import default_device, initialise
from ...runtime.messages import message_group
from ...simulator import simulate
from ..testbed import leave_device
from .correct import corrected, device_factors
from .trials import Load, Trial, hopeful, one_round, same

PLANNING_TIMEOUT_S = 3600.0  # seconds that the others wait for the first rank
MARGIN = 0.03  # relative difference that two turns of one plan may have
CORRECTED_COUNT = 2  # number of plans from the corrected profile that are tried


@dataclass(frozen=True)
class Tuned:
    """The result of tuning: ``plan`` was the fastest of ``trials``, of which the first is the plan that the
    planner prefers."""

    plan: Plan
    trials: tuple[Trial, ...]


def tune(
    load: Load,
    cluster: Cluster,
    profile: Profile | None,
    *,
    planner: str = "auto",
    count: int = 5,
    rounds: int = 2,
    progress: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Tries up to ``count`` plans of different kinds on the cluster that this process is a rank of, each in
    up to ``rounds`` turns, and two more from the profile corrected by the first turns. Collective.

    ``load`` makes a new job for every turn. Errors of planning are raised on all ranks, and so is
    CollectiveError if no plan could train.
    """
    leave_device()
    initialise(cluster.world_size, default_device(), PLANNING_TIMEOUT_S)
    planning = _Planning(load, cluster, planner, progress)
    trials = tuple(map(Trial, planning.plans(profile, count)))
    trials = one_round(load, trials, record=profile is not None, say=progress)
    if profile is not None:
        progress("correcting the profile")
        corrections = factors(cluster, profile, trials)
        plans = planning.plans(corrected(profile, corrections), CORRECTED_COUNT)
        new = [Trial(plan) for plan in plans if not any(same(plan, t.plan) for t in trials)]
        trials += one_round(load, new, say=progress)
    for number in range(1, rounds):
        places = hopeful(trials, number)
        if len(places) < 2:
            break
        again = dict(zip(places, one_round(load, [trials[n] for n in places], say=progress)))
        trials = tuple(again.get(n, t) for n, t in enumerate(trials))
    champion = fastest(trials)
    return Tuned(replace(champion.plan, measured_step_s=champion.step_s), trials)


def fastest(trials: Sequence[Trial]) -> Trial:
    """The trial with the shortest step among those with the most turns. The first trial, which has the best
    prediction, wins unless another is faster by more than two turns of one plan may differ. Raises
    CollectiveError if none could train."""
    able = [t for t in trials if not t.failed]
    if able:
        turns = max(len(t.turns_s) for t in able)
        best = min((t for t in able if len(t.turns_s) == turns), key=lambda t: t.step_s)
        first = trials[0]
        is_level = len(first.turns_s) == turns and first.step_s * (1 - MARGIN) <= best.step_s
        return first if is_level and not first.failed else best
    raise CollectiveError(
        "no plan could train",
        expected="one of them to take a few steps",
        got="; ".join(dict.fromkeys(t.failed for t in trials)),
        hint="mixmesh run JOB --plan X.plan, with the plan of mixmesh plan, to see where it fails",
    )


def factors(cluster: Cluster, profile: Profile, trials: Sequence[Trial]) -> dict[str, float]:
    """For every device, the factor by which it computes slower than in the profile (``device_factors``)."""
    tf32 = any(t.plan.tf32 for t in trials)  # the setting of the job
    costs = CostModel(cluster, profile, tf32=tf32)
    steps = [
        (simulate(t.plan.program, costs, micro_batches=t.plan.micro_batches), t.timeline)
        for t in trials
        if t.timeline is not None
    ]
    return device_factors(cluster, steps)


class _Planning:
    """Traces and plans on the first rank, and sends the plans, or the error, to the others."""

    def __init__(self, load: Load, cluster: Cluster, planner: str, progress: Callable[[str], None]) -> None:
        self.load, self.cluster, self.planner, self.progress = load, cluster, planner, progress
        self._facts: tuple[Traced, OptimizerStates, bool] | None = None

    def plans(self, profile: Profile | None, count: int) -> tuple[Plan, ...]:
        planned: tuple[Plan, ...] = ()
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            leave_device()  # the device's quota is for training only
            try:
                planned = self._make(profile, count)
                message = [list(map(str, planned))]
            except MixmeshError as error:
                message = [error]
        dist.broadcast_object_list(message, group=message_group())
        if isinstance(message[0], MixmeshError):
            raise message[0]
        return planned or tuple(map(Plan.parse, message[0]))

    def _make(self, profile: Profile | None, count: int) -> tuple[Plan, ...]:
        if self._facts is None:
            self.progress("tracing the model")
            job = self.load()
            traced = trace(job.model, job.batch, outputs=job.outputs)
            self._facts = (
                traced,
                optimizer_states(job.optimizer, job.model),
                needs_whole_parameters(job.optimizer),
            )
        traced, states, whole = self._facts
        self.progress("planning")
        return make_plans(
            traced=traced,
            cluster=self.cluster,
            count=count,
            planner=self.planner,
            profile=profile,
            optimizer_states=states,
            whole_parameters=whole,
        )
