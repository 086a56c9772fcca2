"""mixmesh run"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.run_log import RUN_LOG
from ..cluster import Cluster
from ..cost import Profile
from ..errors import InputError, JobError
from ..lang.check import check_plan
from .checkpoint import (
    CheckpointEvery,
    CheckpointFolder,
    CheckpointFresh,
    CheckpointKeep,
    checkpoint_settings,
    checkpoint_stays,
    keeper_of,
)
from .launch import launched_plan, meet
from .live import Live, LogJson, PrintEvery, TensorBoard, check_targets
from .on_nan import AllowNan, OnNanName, on_nan_of
from .output import Json, print_json
from .plan import JobName, PlannerName, ProfileFile
from .prepare import CacheFolder, Fresh, ProfileSeconds, prepared_plan
from .rebalance import Rebalance, balancer_of, planning_again
from .run_results import Results, save_measured
from .testbed import CLUSTER_VARIABLE
from .weights import InitialWeights, initial_weights

if TYPE_CHECKING:
    from ..checkpoint.run import RunCheckpoints
    from ..runtime.parallel import ParallelModel
    from ..runtime.train import RunReport
    from ..training.rebalance import OtherPlan, RunBalancer

DEFAULT_STEPS = 10


def run(
    job: JobName,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="X.plan", help="From mixmesh plan --out; made at the start without."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps to train: 10, unless --epochs is given.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Train so many times on all of the job's data.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the trained weights, whole, as .safetensors, or as torch.save does (.pt).",
        ),
    ] = None,
    on_nan: OnNanName = None,
    allow_nan: AllowNan = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="T.json", help="Measure a few steps; write one for ui.perfetto.dev."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="C.toml",
            help="Plan for this cluster, which is not detected; with --plan and --trace: predict for it.",
        ),
    ] = None,
    profile: ProfileFile = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, metavar="S", help="A collective may take so long.")
    ] = 300.0,
    heartbeat_s: Annotated[
        float,
        typer.Option("--heartbeat", min=1, metavar="S", help="A rank that is silent for so long is lost."),
    ] = 20.0,
    profile_s: ProfileSeconds = 15.0,
    planner: PlannerName = "auto",
    cache: CacheFolder = None,
    is_fresh: Fresh = False,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            "--batch-norm", metavar="KIND", help="exact or local; refuses a plan of the other kind."
        ),
    ] = None,
    checkpoint: CheckpointFolder = None,
    every: CheckpointEvery = None,
    keep: CheckpointKeep = 3,
    is_anew: CheckpointFresh = False,
    weights: InitialWeights = None,
    is_rebalanced: Rebalance = True,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Compile what is between collectives by torch.compile.")
    ] = False,
    print_every: PrintEvery = 1,
    log: LogJson = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Train a job: one process per device, under torchrun or inside the testbed. Without --plan the start
    detects the cluster, profiles and plans the job, and keeps what it found for the next start."""
    if save is not None:
        check_weights_file(save, timeout_s)
    check_targets(log, tensorboard, timeout_s)
    initial = initial_weights(weights, timeout_s)
    what_on_nan = on_nan_of(on_nan, allow_nan)
    kept = checkpoint_settings(checkpoint, every, keep, is_anew, timeout_s)
    if kept is not None and log is None:
        log = kept.folder / RUN_LOG
    jobs = []  # emptied when training starts, which lets go of what it does not need
    again = None  # plans again where devices change their speed
    known: Callable[[], tuple[Cluster | None, Profile | None]]
    if plan is None:
        with checkpoint_stays(kept):
            loaded, prepared, rank = prepared_plan(
                job,
                profile_s,
                planner,
                cache,
                is_fresh,
                batch_norm or "exact",
                cluster,
                heartbeat_s,
                compiles,
            )
        jobs.append(loaded)
        del loaded
        loaded_plan, known = prepared.plan, lambda: (prepared.cluster, prepared.profile)
        if kept is not None:
            again = planning_again(job, prepared, planner, profile_s, batch_norm or "exact")
    else:
        loaded_plan, rank = launched_plan(job, plan, batch_norm, timeout_s)
        known = lambda: described_costs(cluster, profile)  # noqa: E731
    num_steps = steps or (None if epochs else DEFAULT_STEPS)
    described = predicted = None
    if trace is not None:
        check_trace(trace, num_steps)
        described = described_cluster(cluster)
        if described is not None:
            from ..api import simulate as simulate_plan

            predicted = simulate_plan(loaded_plan, described, profile=profile, events=True)
    from ..frontend.job import batch_size, load_job
    from ..lang.check import check_program
    from ..measure.testbed import leave_device
    from ..runtime.comm import leave
    from ..runtime.train import train

    check_program(loaded_plan.program, str(plan or "the plan made at the start"))
    if plan is not None and CLUSTER_VARIABLE in os.environ:
        check_plan(loaded_plan, Cluster.load(os.environ[CLUSTER_VARIABLE]), where=str(plan))

    if not jobs:
        jobs.append(load_job(job))
    is_quiet, goes_to = bool(rank) or as_json, (None, None) if rank else (log, tensorboard)
    live = Live(
        loaded_plan, batch_size(jobs[0].batch), num_steps, goes_to, is_quiet=is_quiet, print_every=print_every
    )
    earlier: Trained | None = None
    while True:
        balancer = balancer_of(is_rebalanced, loaded_plan, jobs[0], known, num_steps, live, again)
        keeper = keeper_of(
            kept,
            loaded_plan,
            epochs,
            initial,
            is_quiet=is_quiet,
            may_follow=balancer is not None,
            on_saved=live.saved,
        )
        report = train(
            jobs.pop(),
            loaded_plan,
            steps=num_steps,
            epochs=epochs,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            record=trace is not None,
            check_model=plan is not None,
            compile=compiles,
            on_nan=what_on_nan,
            keeper=keeper,
            balancer=balancer,
            initial=initial,
            on_start=starter(live, keeper),
            on_step=live.after_step,
            on_end=writer(save),
        )
        if earlier is not None and keeper is not None and balancer is not None:
            report = earlier.report.followed_by(report)
            keeper.goes_on_from(earlier.keeper)
            balancer = earlier.balancer.followed_by(balancer)
        earlier = to_go_on(report, keeper, balancer)
        if earlier is None or kept is None:
            break
        # under another plan, from the checkpoint of this moment
        loaded_plan, known = earlier.following.plan, found_costs(earlier.following)
        live.follow(loaded_plan)
        earlier.keeper.close()
        earlier.balancer.close()
        leave_device()
        gc.collect()  # the model before, of which nothing is needed any more
        kept = replace(kept, is_fresh=False)
        jobs.append(load_job(job))
    live.close()
    leave()
    status = keeper.close() if keeper is not None else 0
    if rank:
        raise typer.Exit(status)
    if not report.step_s and keeper is None:
        raise JobError("the job's data has no batch", expected="at least one batch", where=job)
    compared = None if trace is None else save_measured(report, trace, described, predicted)
    results = Results(loaded_plan, report, keeper, balancer, save, trace, compared, is_stopped=bool(status))
    if as_json:
        print_json(results.object())
    else:
        print("\n".join(results.lines()), flush=True)
    raise typer.Exit(status)


@dataclass(frozen=True)
class Trained:
    """A part of a training, which the plan of another form follows in these processes."""

    report: RunReport
    keeper: RunCheckpoints
    balancer: RunBalancer
    following: OtherPlan


def to_go_on(
    report: RunReport, keeper: RunCheckpoints | None, balancer: RunBalancer | None
) -> Trained | None:
    """The finished part of a training, if a plan of another form follows; not after a signal."""
    if balancer is None or balancer.following is None or keeper is None or keeper.stopped_by:
        return None
    return Trained(report, keeper, balancer, balancer.following)


def found_costs(other: OtherPlan) -> Callable[[], tuple[Cluster | None, Profile | None]]:
    """The cluster and the profile as the devices turned out to be."""
    return lambda: (other.cluster, other.profile)


def starter(live: Live, keeper: RunCheckpoints | None) -> Callable[[], None]:
    """A function that is called before the first step: the log has its start, and the process its device."""
    from ..measure.testbed import enter_device

    def start() -> None:
        live.started(0 if keeper is None else keeper.first_step)
        enter_device()

    return start


def described_cluster(path: Path | None) -> Cluster | None:
    """The cluster that is named, or the testbed's."""
    given = path or os.environ.get(CLUSTER_VARIABLE)
    return None if given is None else Cluster.load(given)


def described_costs(cluster: Path | None, profile: Path | None) -> tuple[Cluster | None, Profile | None]:
    """The cluster, and what was measured on it, as far as they are given."""
    from ..api import load_profile

    return described_cluster(cluster), load_profile(profile)


def check_weights_file(path: Path, timeout_s: float) -> None:
    """Raises InputError on all ranks if the first one cannot write the weights. Before the training, not
    after it."""
    from ..runtime.first_rank import from_first_rank
    from ..runtime.saving import check_file

    meet(timeout_s)
    from_first_rank(lambda: check_file(path))


def writer(path: Path | None) -> Callable[[ParallelModel], None]:
    """A function that writes the whole weights of a model, from the first rank. Collective."""
    from ..runtime.first_rank import from_first_rank
    from ..runtime.saving import save_weights

    def write(model: ParallelModel) -> None:
        if path is not None:
            state = model.full_state_dict(rank0_only=True)
            from_first_rank(lambda: save_weights(state, path))

    return write


def check_trace(trace: Path, steps: int | None) -> None:
    """Before the training, not after it."""
    from ..runtime.train import WARMUP_STEPS

    if steps is not None and steps <= WARMUP_STEPS:
        raise InputError(
            "too few steps for a timeline",
            expected=f"--steps {WARMUP_STEPS + 1} or more: the first {WARMUP_STEPS} are not like the others",
            got=f"--steps {steps}",
        )
    if not trace.parent.is_dir():
        raise InputError(
            "the timeline could not be written", where=str(trace), got=f"no folder {trace.parent}"
        )
