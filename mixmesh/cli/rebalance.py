"""The option of ``mixmesh run`` for shares that follow the speeds of devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.progress import tell
from ..cluster import Cluster
from ..cost import Profile
from ..lang.plan_file import Plan
from .live import Live
from .prepare import Preparing, check_data

if TYPE_CHECKING:
    from ..training.preparation import Prepared
    from ..training.rebalance import RunBalancer
    from ..training.rebalance.replan import PlanFor

Rebalance = Annotated[
    bool,
    typer.Option(
        "--rebalance/--no-rebalance",
        help="On CPUs: change shares, or the plan, if a device gets slower or faster than planned.",
    ),
]


PLANNING = "tracing", "plan"  # the phases of a preparation that planning repeats


def balancer_of(
    is_wanted: bool,
    plan: Plan,
    job: Any,
    costs: Callable[[], tuple[Cluster | None, Profile | None]],
    num_steps: int | None,
    live: Live,
    plan_for: tuple[PlanFor, float] | None = None,
) -> RunBalancer | None:
    """The balancer of a run; ``costs`` gives the first rank the cluster and its profile. Collective.

    None if it is turned off, if one device trains alone, and on GPUs, where a rank's own seconds are unknown;
    also if the cluster is unknown, in which case the first rank prints a line. ``plan_for`` plans again on
    the first rank, together with the seconds that this takes; with it a plan of another form may follow.
    """
    if not is_wanted or plan.program.world_size == 1:
        return None
    from ..runtime.comm import default_device
    from ..runtime.first_rank import from_first_rank
    from ..training.rebalance import Replanner, RunBalancer, Solver

    if default_device().type != "cpu":
        return None
    is_first = os.environ.get("RANK", "0") == "0"

    def say(text: str) -> None:
        if is_first:
            tell(f"mixmesh: {text}")

    solvers: list[Solver] = []  # empty on all ranks but the first, which solves for all

    def find() -> bool:
        cluster, profile = costs()
        if cluster is not None and cluster.fingerprint == plan.cluster_fingerprint:
            solvers.append(Solver(cluster, profile, plan.optimizer_states))
        return bool(solvers)

    if not from_first_rank(find):
        say("shares stay as planned: the plan's cluster is not known (--cluster C.toml, or --no-rebalance)")
        return None
    return RunBalancer(
        solvers[0] if solvers else None,
        num_steps,
        say,
        on_window=live.own_seconds,
        on_change=live.shares_changed,
        replanner=Replanner(*plan_for) if plan_for is not None else None,
    )


def planning_again(
    job: str, prepared: Prepared, preparing: Preparing, num_steps: int | None
) -> tuple[PlanFor, float]:
    """A function that plans the job again for a cluster and a profile, on the first rank, for a run of
    ``num_steps`` or of whole epochs, and the seconds that planning took at the start (without results from
    the cache)."""

    def plan_for(cluster: Cluster, profile: Profile | None) -> Plan:
        from ..frontend.job import load_job
        from ..training.preparation import plan_again, same_random_numbers

        with same_random_numbers():
            loaded = load_job(job)
            check = partial(check_data, loaded, num_steps)
            return plan_again(loaded, cluster, profile, preparing.options(), check)

    return plan_for, sum(phase.time_s for phase in prepared.phases if phase.name in PLANNING)
