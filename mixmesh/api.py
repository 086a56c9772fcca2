"""The functions of the root package: a model, a batch and a cluster in, a plan or a timeline out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base.timeline import Timeline
from .cluster import Cluster
from .cost import CostModel, Profile
from .lang.plan_file import Plan

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
    search_s: float | None = None,
    exact_s: float | None = None,
    unmeasured: Collection[str] = (),
    batch_norm: str = "exact",
    outputs: Collection[str | int] = (),
    autocast: Any = None,
    accumulate: str = "",
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan found for training ``model`` on ``cluster``; ``batch`` is one global batch.

    ``profile`` holds measured costs; without one they are estimated from the cluster file. ``exact_s`` is the
    time that HiGHS may take to prove how much more the chosen program costs than the cheapest. ``optimizer``
    decides how many tensors of state a parameter has, and whether parameters may be cut. ``search_s`` is the
    time limit of the planners heterog, tag and placed; ``auto`` asks them only if it is given. ``unmeasured``
    names mechanisms of GPUs to count on that were never measured (``mixmesh.cost.UNMEASURED``).
    ``batch_norm`` says whose statistics batch norm takes: those of the whole batch ("exact", as on a single
    device), or of each rank's own samples ("local", as under DistributedDataParallel: other numbers than the
    single device's). ``outputs`` names what the parallel model returns besides the loss, out of what the
    model returns: ``("logits",)``, or ``(1,)`` for a tuple. ``autocast`` is the ``torch.autocast`` that the
    model will be called under, or its dtype; without one it is the context that ``plan`` is called under.
    ``accumulate`` counts gradients of earlier backward passes for the same optimizer step: those of
    ``no_sync`` ("no_sync"), or summed ones ("every pass"). ``progress`` is called with a description of each
    step of the work.

    Raises TraceError if the model cannot be exported, Infeasible if no plan fits in memory.
    """
    from .frontend.job import earlier_gradients, needs_whole_parameters, optimizer_states
    from .frontend.trace import check_batch_norm, trace
    from .frontend.trace.autocast import autocast_for
    from .planner import check_limits, check_planner

    check_planner(planner)  # before the model is traced, not after
    check_batch_norm(batch_norm)
    check_limits(exact_s, search_s)
    if progress:
        progress("tracing the model")
    states = optimizer_states(optimizer, model)._replace(earlier=earlier_gradients(accumulate))
    return plan_traced(
        trace(model, batch, batch_norm=batch_norm, outputs=outputs, autocast=autocast_for(model, autocast)),
        cluster,
        planner=planner,
        profile=profile,
        optimizer_states=states,
        whole_parameters=needs_whole_parameters(optimizer),
        search_s=search_s,
        exact_s=exact_s,
        unmeasured=unmeasured,
        progress=progress,
    )


def plan_traced(
    traced: Any, cluster: Cluster, *, profile: Profile | str | Path | None = None, **options: Any
) -> Plan:
    """``plan`` for what ``trace`` returned; its warnings join the plan's."""
    from .planner import make_plan

    plan = make_plan(traced, cluster, profile=load_profile(profile), **options)
    extra = tuple(w for w in traced.warnings if w not in plan.warnings)
    return replace(plan, warnings=plan.warnings + extra)


def load_profile(profile: Profile | str | Path | None) -> Profile | None:
    return Profile.load(profile) if isinstance(profile, str | Path) else profile


def simulate(
    plan: Plan, cluster: Cluster, *, profile: Profile | str | Path | None = None, events: bool = False
) -> Timeline:
    """Predicts one step of ``plan`` on ``cluster``, in detail if ``events`` are requested. Raises PlanError
    if the plan was made for another cluster, VerificationError if it was edited and is not valid."""
    from .lang.check import check_loaded, check_plan
    from .simulator import simulate as run

    if plan.edited:
        check_loaded(plan)
    check_plan(plan, cluster)
    costs = CostModel(cluster, load_profile(profile), tf32=plan.tf32)
    states, micro_batches = plan.optimizer_states, plan.micro_batches
    return run(
        plan.program,
        costs,
        optimizer_states=states,
        micro_batches=micro_batches,
        events=events,
        usable_bytes=plan.usable_bytes,
    )
