"""Everything between a job and its first step: detects the cluster, profiles the job and plans it. Results
are kept, so that the next start takes only seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...api import plan_traced
from ...base.progress import Teller, telling
from ...base.units import plural, seconds_text
from ...cluster import Cluster
from ...cluster.detection import Cache, calibrations_of, detect, read_inventory
from ...cluster.detection.cache import key_of
from ...cost import Profile
from ...cost.gpu_memory import allocator_loss
from ...errors import Infeasible, InputError
from ...explain.headline import headline
from ...frontend.job import earlier_gradients, needs_whole_parameters, optimizer_states
from ...frontend.trace import LossSource, Traced, check_batch_norm, check_has_shapes, trace
from ...lang.plan_devices import planned_devices
from ...lang.plan_file import Plan
from ...measure.profiler import profile as measure_profile
from ...measure.profiler import profile_links
from ...measure.testbed import enter_device, leave_device
from ...planner import check_planner
from ...runtime.accelerator import backend_of
from ...runtime.comm import LEAST_S, default_device, initialise
from ...runtime.first_rank import from_first_rank
from ...runtime.original import traceable
from ...runtime.start import compare_first
from ...runtime.taking_part import taking_part
from ...runtime.versions import package_version
from ...runtime.watch import watch_of_process
from .kinds import Kinds
from .phases import Phase, Phases, cluster_words, plan_words, profile_words, trace_words

Check = Callable[[Plan], object]
OF_ANY_SIZE = "hap"  # a planner whose plans take batches of any size


@dataclass(frozen=True)
class Options:
    """Limits on measuring and searching. With ``profile_s`` 0 plans are based on the devices' figures.

    Raises InputError for an unknown planner or kind of batch norm, before anything is measured.
    """

    profile_s: float = 15.0
    planner: str = "auto"
    search_s: float | None = None
    timeout_s: float = 300.0
    heartbeat_s: float = 20.0  # a rank that is silent for this long counts as lost; 0 turns this off
    batch_norm: str = "exact"  # or "local": statistics of each rank's own samples
    autocast: tuple[str, str] | None = None  # the context in which the model will be called
    # whether the optimizer needs whole parameters, even if the job's own does not
    whole_parameters: bool = False
    # whether operators between collectives are compiled, and whole steps are measured compiled
    compiles: bool = False
    loss: LossSource = LossSource.RETURNED
    accumulate: str = ""  # how the loop accumulates gradients (``earlier_gradients``)

    def __post_init__(self) -> None:
        check_planner(self.planner)
        check_batch_norm(self.batch_norm)
        earlier_gradients(self.accumulate)


@dataclass(frozen=True)
class Device:
    """Callbacks around computing on a rank's device: ``on_start`` before, ``on_end`` after. By default they
    enter and leave the CPU quota of an emulated device; outside of the testbed these do nothing."""

    on_start: Callable[[], object] = enter_device
    on_end: Callable[[], object] = leave_device


@dataclass(frozen=True)
class Prepared:
    """The result of a preparation. ``profile`` is None if none was requested."""

    cluster: Cluster
    profile: Profile | None
    plan: Plan
    phases: tuple[Phase, ...]


@taking_part("the preparation")
def prepare_job(
    job: Any,
    world_size: int,
    *,
    options: Options | None = None,
    cache: Cache | None = None,
    device: Device | None = None,
    cluster_file: Path | None = None,
    progress: Callable[[str], None] | None = None,
    check: Check = lambda plan: None,
) -> Prepared:
    """The plan for ``job`` on the devices of all ranks, with the cluster and the profile that it rests on.
    Collective; initialises ``torch.distributed``. The first rank reports its progress, the decision of each
    phase, and the plan in one line on standard error; or ``progress`` is called at each small step.
    ``check`` raises InputError for a plan that some batch does not fit: where the planner is "auto", a plan
    of ``OF_ANY_SIZE`` takes the place of such a plan, if one fits in memory.

    Only the first rank traces and plans, and only its ``cache`` counts. Its ``cluster_file`` describes the
    devices and links; without one they are detected. An error of the first rank is raised on all ranks:
    TraceError for a model that cannot be exported, Infeasible if nothing fits, InputError for a cluster file
    with another number of devices; CollectiveError for a rank that is lost meanwhile.
    """
    options, device = options or Options(), device or Device()
    check_has_shapes(job.model)
    where = default_device()
    initialise(world_size, where, options.timeout_s)
    if options.heartbeat_s:
        watch_of_process(options.heartbeat_s, max(options.timeout_s, LEAST_S))
    with telling(dist.get_rank(), "mixmesh") if progress is None else nullcontext(Teller(progress)) as teller:
        phases = Phases(cache or Cache(None), teller)
        prepared = _prepared(job, where, options, phases, device, cluster_file, check)
        teller.line(f"mixmesh: {headline(prepared.plan, prepared.cluster)}")
    return prepared


def _prepared(
    job: Any,
    where: torch.device,
    options: Options,
    phases: Phases,
    device: Device,
    cluster_file: Path | None,
    check: Check,
) -> Prepared:
    progress, world_size = phases.teller, dist.get_world_size()
    phases.new(
        "comparison of the ranks",
        lambda: compare_first(job.model),
        lambda _: f"one model, one code and the same versions on {plural(world_size, 'rank')}",
    )
    versions = package_version(), torch.__version__
    if cluster_file is not None:
        cluster = from_first_rank(lambda: described_cluster(cluster_file, world_size))
    else:
        cluster = detected_cluster(where, phases, device, versions)
    traced = phases.new(
        "tracing", lambda: from_first_rank(lambda: traced_job(job, options), what="tracing"), trace_words
    )
    whole_parameters = needs_whole_parameters(job.optimizer) or options.whole_parameters
    optimizer = optimizer_states(job.optimizer, job.model), whole_parameters
    job_key = key_of(traced.graph.fingerprint, cluster.fingerprint, optimizer, *versions)
    profile = None
    if options.profile_s:
        kind_key = key_of(traced.graph.fingerprint, optimizer, *versions, options.profile_s, options.compiles)
        kinds = Kinds.of(phases.cache, kind_key, where)
        profile = phases.kept(
            "profile",
            f"profiles/{key_of(job_key, options.profile_s, options.compiles)}.json",
            (Profile.load, lambda made, path: made.save(path)),
            lambda: _profiled(traced.graph, job, cluster, kinds, options, device, progress),
            profile_words,
        )
    call = traced.arguments, traced.output_has_loss, traced.returned, traced.left

    def planned_by(planner: str) -> Plan:
        by = replace(options, planner=planner)
        what_plans_rest_on = replace(by, timeout_s=0.0, heartbeat_s=0.0)
        plan_key = key_of(job_key, what_plans_rest_on, *call, allocator_loss())
        return phases.kept(
            "plan",
            f"plans/{plan_key}.plan",
            (Plan.load, lambda made, path: made.save(path)),
            lambda: from_first_rank(
                lambda: _planned(traced, job, cluster, profile, by, progress), what="plan"
            ),
            plan_words,
        )

    plan = _for_all_batches(planned_by, options.planner, check, from_first_rank, phases.teller.line)
    check(plan)
    # a plan that was kept may come from a start on equal machines with other names
    plan = replace(plan, devices=planned_devices(cluster))
    return Prepared(cluster, profile, plan, tuple(phases.finished))


def _for_all_batches(
    planned_by: Callable[[str], Plan],
    planner: str,
    check: Check,
    agreed: Callable[[Callable[[], str]], str],
    say: Callable[[str], None],
) -> Plan:
    """The plan of a ``planner``, or for "auto" one of ``OF_ANY_SIZE`` if that plan does not pass the
    ``check``; ``agreed`` calls a function and gives its result to all ranks that plan."""
    plan = planned_by(planner)
    if planner != "auto" or plan.order is None:
        return plan
    refusal = agreed(lambda: _refusal_by(check, plan))
    if not refusal:
        return plan
    try:
        other = planned_by(OF_ANY_SIZE)
    except Infeasible:
        return plan
    longer = f"{seconds_text(other.predicted_step_s)} a step instead of {seconds_text(plan.predicted_step_s)}"
    say(f"mixmesh: {OF_ANY_SIZE} in place of {plan.planner}, {longer}: {refusal}; drop_last=True keeps it")
    return other


def _refusal_by(check: Check, plan: Plan) -> str:
    try:
        check(plan)
    except InputError as refusal:
        return refusal.message
    return ""


def plan_again(
    job: Any, cluster: Cluster, profile: Profile | None, options: Options, check: Check = lambda plan: None
) -> Plan:
    """Plans ``job`` again for a cluster, with everything that is known about the cluster by now; ``check`` is
    that of ``prepare_job``. Raises Infeasible if nothing fits in memory, InputError if only plans fit that
    the check refuses. Not collective."""
    traced = traced_job(job, options)

    def planned_by(planner: str) -> Plan:
        return _planned(traced, job, cluster, profile, replace(options, planner=planner), lambda _: None)

    plan = _for_all_batches(planned_by, options.planner, check, lambda refusal: refusal(), lambda _: None)
    check(plan)
    return plan


def _planned(
    traced: Traced,
    job: Any,
    cluster: Cluster,
    profile: Profile | None,
    options: Options,
    progress: Callable[[str], None],
) -> Plan:
    states = optimizer_states(job.optimizer, job.model)
    return plan_traced(
        traced,
        cluster,
        profile=profile,
        planner=options.planner,
        search_s=options.search_s,
        optimizer_states=states._replace(earlier=earlier_gradients(options.accumulate)),
        whole_parameters=needs_whole_parameters(job.optimizer) or options.whole_parameters,
        progress=progress,
    )


def described_cluster(file: Path, world_size: int) -> Cluster:
    """The cluster in a file, whose devices are the ranks in their order."""
    cluster = Cluster.load(file)
    if cluster.world_size != world_size:
        raise InputError(
            "the cluster file describes another number of devices",
            expected=f"{plural(world_size, 'device')}, one for each rank",
            got=plural(cluster.world_size, "device"),
            where=str(file),
            hint=f"torchrun --nproc-per-node {cluster.world_size} ..., or mixmesh detect --out FILE",
        )
    return cluster


def detected_cluster(
    where: torch.device, phases: Phases, device: Device, versions: tuple[str, ...]
) -> Cluster:
    """The cluster of all ranks, as an earlier start with these ``versions`` or this one measured it."""
    inventory = read_inventory(where)
    calibrations = from_first_rank(lambda: calibrations_of(inventory))
    key = key_of(inventory.fingerprint, backend_of(), *versions, *calibrations.values())
    return phases.kept(
        "devices and links",
        f"clusters/{key}.toml",
        (Cluster.load, lambda made, path: path.write_text(made.to_toml())),
        lambda: detect(
            where,
            inventory=inventory,
            calibrations=calibrations,
            on_start=device.on_start,
            on_end=device.on_end,
            progress=phases.teller,
        ),
        cluster_words,
    )


def traced_job(job: Any, options: Options) -> Traced:
    """The job's model, traced in the way in which it will be called."""
    with traceable(job.model):  # parts of it may already be parallel, as with a generator and its critic
        return trace(
            job.model,
            job.batch,
            batch_norm=options.batch_norm,
            outputs=job.outputs,
            autocast=options.autocast,
            loss=options.loss,
        )


def _profiled(graph, job, cluster, kinds: Kinds, options: Options, device: Device, progress) -> Profile:
    rank = dist.get_rank()
    known_devices = kinds.load_all(cluster, rank)
    common = {"budget_s": options.profile_s, "on_start": device.on_start, "progress": progress}
    try:
        if known_devices is not None:
            progress("operators: kept of devices of these kinds")
            return profile_links(graph, cluster, known_devices, **common)
        new_profile = measure_profile(
            graph,
            job,
            cluster,
            compiles=options.compiles,
            kept_process=kinds.process(),
            autocast=options.autocast,
            **common,
        )
    finally:
        device.on_end()
    is_first_here = rank == cluster.ranks_of(cluster.machine_index_of(rank))[0]
    kinds.save_all(new_profile, cluster, rank, is_first_here)
    return new_profile
