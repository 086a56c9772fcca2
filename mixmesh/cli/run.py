"""mixmesh run"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.progress import say
from ..base.run_log import RUN_LOG
from ..errors import InputError, JobError
from .checkpoint import (
    CheckpointEvery,
    CheckpointFolder,
    CheckpointFresh,
    CheckpointKeep,
    checkpoint_settings,
)
from .launch import meet
from .live import Live, LogJson, PrintEvery, TensorBoard, check_targets
from .on_nan import AllowNan, OnNanName, on_nan_of
from .output import Json, check_folder_of, print_json
from .plan import JobName, PlannerName, ProfileFile
from .prepare import CacheFolder, Fresh, Preparing, ProfileSeconds, check_data
from .rebalance import Rebalance
from .run_results import Results, save_measured
from .run_training import RunOptions, check_start, note_stop, prediction_of, start_run, train_all
from .weights import InitialWeights, initial_weights

DEFAULT_STEPS = 10


def run(
    job: JobName,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="X.plan", help="From mixmesh plan --out; without one, the start makes it."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps to train: 10, unless --epochs is given.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Train this many times on all of the job's data.")
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
        float, typer.Option("--timeout", min=1, metavar="S", help="Time limit of a collective.")
    ] = 300.0,
    heartbeat_s: Annotated[
        float,
        typer.Option("--heartbeat", min=1, metavar="S", help="A rank silent for this long counts as lost."),
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
        bool, typer.Option("--compile", help="Compile the operators between collectives.")
    ] = False,
    print_every: PrintEvery = 1,
    log: LogJson = None,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
) -> None:
    """Train a job: one process per device, under torchrun or inside the testbed. Without --plan the start
    detects the cluster, profiles and plans the job, and keeps what it found for the next start."""
    if plan is None and profile is not None:
        raise InputError(
            "a start without a plan measures its own profile",
            expected="--profile beside --plan",
            got=f"--profile {profile}",
            hint=f"mixmesh plan {job} --cluster C.toml --profile {profile} --out X.plan",
        )
    if plan is not None and planner != "auto":
        raise InputError(
            "a planner that is named beside a plan would not be asked",
            expected="--plan or --planner",
            got=f"--plan {plan} --planner {planner}",
            hint=f"mixmesh run {job} --planner {planner}",
        )
    if save is not None:
        check_weights_file(save, timeout_s)
    num_steps = steps or (None if epochs else DEFAULT_STEPS)
    if trace is not None:
        check_trace(trace, num_steps, timeout_s)
    initial = initial_weights(weights, timeout_s)
    what_on_nan = on_nan_of(on_nan, allow_nan)
    checkpoints = checkpoint_settings(checkpoint, every, keep, is_anew, timeout_s)
    if checkpoints is not None and log is None:
        log = checkpoints.folder / RUN_LOG
    check_targets(log, tensorboard, timeout_s)
    options = RunOptions(
        job=job,
        plan=plan,
        num_steps=num_steps,
        epochs=epochs,
        save=save,
        trace=trace,
        cluster=cluster,
        profile=profile,
        timeout_s=timeout_s,
        preparing=Preparing(
            profile_s,
            planner,
            cache,
            is_fresh,
            batch_norm or "exact",
            cluster,
            heartbeat_s,
            timeout_s,
            compiles,
        ),
        batch_norm=batch_norm,
        on_nan=what_on_nan,
        checkpoints=checkpoints,
        initial=initial,
        is_rebalanced=is_rebalanced,
        print_every=print_every,
        log=log,
        tensorboard=tensorboard,
        as_json=as_json,
    )
    raise typer.Exit(run_training(options))


def run_training(options: RunOptions) -> int:
    """Trains and prints the results; returns the exit status."""
    from ..frontend.job import batch_size, load_job
    from ..runtime.comm import leave

    start, job = start_run(options)
    described, predicted = prediction_of(options, start.plan)
    check_start(options, start.plan)
    jobs = [load_job(options.job) if job is None else job]
    check_data(jobs[0], options.num_steps, start.plan)
    del job  # the training frees the parts that it does not need
    live = Live(
        start.plan,
        batch_size(jobs[0].batch),
        options.num_steps,
        (None, None) if start.rank else (options.log, options.tensorboard),
        is_quiet=bool(start.rank) or options.as_json,
        print_every=options.print_every,
    )
    trained = train_all(options, start, jobs, live)
    note_stop(live, trained.keeper)
    live.close()
    leave()
    status = 0 if trained.keeper is None else trained.keeper.close()
    is_stopped = bool(status)
    if not status and options.save is None and trained.keeper is not None and not trained.keeper.is_saved:
        status = 1  # the trained weights are nowhere
    if start.rank:
        return status
    if not trained.num_steps and not is_stopped:
        raise JobError("the job's data has no batch", expected="at least one batch", where=options.job)
    compared = None
    if options.trace is not None:
        compared = save_measured(trained.report, options.trace, described, predicted)
    results = Results(options, trained, compared, is_stopped)
    if options.as_json:
        print_json(results.object())
    else:
        say("\n".join(results.lines()))
    return status


def check_weights_file(path: Path, timeout_s: float) -> None:
    """Raises InputError on all ranks if the first one cannot write the weights: before the training, not
    after it."""
    from ..runtime.first_rank import from_first_rank
    from ..runtime.saving import check_file

    meet(timeout_s)
    from_first_rank(lambda: check_file(path))


def check_trace(trace: Path, steps: int | None, timeout_s: float) -> None:
    """Raises InputError on all ranks if the timeline could not be measured, or written by the first one:
    before the training, not after it."""
    from ..runtime.first_rank import from_first_rank
    from ..runtime.train import WARMUP_STEPS

    if steps is not None and steps <= WARMUP_STEPS:
        raise InputError(
            "too few steps for a timeline",
            expected=f"--steps {WARMUP_STEPS + 1} or more: the first {WARMUP_STEPS} are not like the others",
            got=f"--steps {steps}",
        )
    meet(timeout_s)
    from_first_rank(lambda: check_folder_of(trace, "the timeline"))
