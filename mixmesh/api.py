"""The functions of the root package: a model, a batch and a cluster in, a plan or a timeline out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cluster import Cluster
from .cost import CostModel, Profile
from .plan_file import Plan
from .simulator import Timeline

if TYPE_CHECKING:
    from torch import nn, optim


def plan(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple,
    cluster: Cluster,
    *,
    planner: str = "auto",
    profile: Profile | str | Path | None = None,
    optimizer: Callable[[Iterable], optim.Optimizer] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan found for training ``model`` on ``cluster``, ``batch`` being one global batch.

    ``profile`` holds measured costs; without one they are estimated from the cluster file.
    ``optimizer`` decides how many tensors of state a parameter has. ``progress`` is told what is being
    done. Raises TraceError if the model cannot be exported, Infeasible if no plan fits in memory.
    """
    from .planner import make_plan
    from .trace import trace

    if progress:
        progress("tracing the model")
    traced = trace(model, batch)
    if isinstance(profile, str | Path):
        profile = Profile.load(profile)
    return make_plan(
        traced, cluster, planner=planner, profile=profile, optimizer=optimizer, progress=progress
    )


def simulate(
    plan: Plan, cluster: Cluster, *, profile: Profile | str | Path | None = None, events: bool = False
) -> Timeline:
    """Predicts one step of ``plan`` on ``cluster``. Raises PlanError if it was made for another cluster."""
    from .check import check_plan
    from .simulator import simulate as run

    check_plan(plan, cluster)
    if isinstance(profile, str | Path):
        profile = Profile.load(profile)
    return run(plan.program, CostModel(cluster, profile), events=events)
