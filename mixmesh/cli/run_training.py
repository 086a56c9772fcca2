"""The training of ``mixmesh run``: its start, its parts (each under one plan), and their ends."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

from ..base.run_log import RUN_LOG
from ..base.timeline import Timeline
from ..cluster import Cluster
from ..cost import Profile
from ..frontend.job import Job
from ..lang.check import check_plan
from ..lang.plan_file import Plan
from .checkpoint import checkpoint_stays, keeper_of
from .faults import note_faults
from .launch import launched_plan
from .live import Live
from .prepare import Preparing, prepared_plan
from .rebalance import balancer_of, planning_again
from .testbed import CLUSTER_VARIABLE

if TYPE_CHECKING:
    from ..checkpoint.run import RunCheckpoints, Settings
    from ..runtime.finite import OnNan
    from ..runtime.parallel import ParallelModel
    from ..runtime.train import RunReport
    from ..training.rebalance import OtherPlan, RunBalancer
    from ..training.rebalance.replan import PlanFor

# facts that may be known on the first rank only
Costs = Callable[[], tuple[Cluster | None, Profile | None]]


@dataclass(frozen=True)
class RunOptions:
    """The checked options of a run. ``num_steps`` is None for a run over ``epochs``; ``is_quiet``: no
    progress is printed; ``initial`` gives a model its first weights."""

    job: str
    plan: Path | None
    num_steps: int | None
    epochs: int | None
    save: Path | None
    trace: Path | None
    cluster: Path | None
    profile: Path | None
    timeout_s: float
    preparing: Preparing
    batch_norm: str | None
    on_nan: OnNan
    checkpoints: Settings | None
    initial: Callable[[ParallelModel], object]
    is_rebalanced: bool
    print_every: int
    log: Path | None
    tensorboard: Path | None
    as_json: bool


@dataclass(frozen=True)
class Start:
    """The start of a run on this ``rank``: its plan and the costs that it was made from. ``replan`` plans
    again if devices change their speeds."""

    plan: Plan
    rank: int
    costs: Costs
    replan: tuple[PlanFor, float] | None = None


def start_run(options: RunOptions) -> tuple[Start, Job | None]:
    """Reads the plan of a run, or makes one; then the job is loaded too. Collective."""
    if options.plan is not None:
        plan, rank = launched_plan(options.job, options.plan, options.batch_norm, options.timeout_s)
        return Start(plan, rank, lambda: described_costs(options.cluster, options.profile)), None
    with checkpoint_stays(options.checkpoints):
        job, prepared, rank = prepared_plan(options.job, options.preparing, options.num_steps)
    replan = None
    if options.checkpoints is not None:
        replan = planning_again(options.job, prepared, options.preparing, options.num_steps)
    return Start(prepared.plan, rank, lambda: (prepared.cluster, prepared.profile), replan), job


def check_start(options: RunOptions, plan: Plan) -> None:
    """Raises an error for a plan that is invalid, or that was made for another cluster than the testbed's."""
    from ..lang.check import check_program

    check_program(plan.program, str(options.plan or "the plan made at the start"))
    if options.plan is not None and CLUSTER_VARIABLE in os.environ:
        check_plan(plan, Cluster.load(os.environ[CLUSTER_VARIABLE]), where=str(options.plan))


@dataclass(frozen=True)
class Trained:
    """A finished training, or a part of one under one plan."""

    plan: Plan
    report: RunReport
    keeper: RunCheckpoints | None
    balancer: RunBalancer | None

    @property
    def num_steps(self) -> int:
        """The number of steps made, including those of earlier starts."""
        return len(self.report.step_s) + (0 if self.keeper is None else self.keeper.first_step)

    @property
    def following(self) -> OtherPlan | None:
        """The plan of another form under which the training continues; None after a signal, or without
        checkpoints."""
        if self.balancer is None or self.keeper is None or self.keeper.stopped_by:
            return None
        return self.balancer.following

    @property
    def cause(self) -> str:
        """The reason, in words, for the plan that follows; "" if none does."""
        if self.following is None or self.balancer is None:
            return ""
        return self.balancer.decisions[-1].cause

    def followed_by(self, later: Trained) -> Trained:
        """Both parts as one training."""
        if self.keeper is None or self.balancer is None or later.keeper is None or later.balancer is None:
            return later
        later.keeper.goes_on_from(self.keeper)
        report = self.report.followed_by(later.report)
        return Trained(later.plan, report, later.keeper, self.balancer.followed_by(later.balancer))

    def close(self) -> None:
        """Ends a part of the training that another part follows in these processes."""
        from ..measure.testbed import leave_device

        if self.keeper is not None:
            self.keeper.close()
        if self.balancer is not None:
            self.balancer.close()
        leave_device()
        gc.collect()  # frees the model of this part


def train_all(options: RunOptions, start: Start, jobs: list[Job], live: Live) -> Trained:
    """Trains under the plan of the start, and under plans of other forms that follow it. Takes the job out of
    ``jobs``, so that its model can be freed during the training."""
    from ..frontend.job import load_job

    trained: Trained | None = None
    while True:
        part = train_part(options, start, jobs, live, "" if trained is None else trained.cause)
        trained = part if trained is None else trained.followed_by(part)
        following = trained.following
        if following is None or options.checkpoints is None:
            return trained
        # the next part starts from this checkpoint
        start = replace(start, plan=following.plan, costs=costs_of(following))
        options = replace(options, checkpoints=replace(options.checkpoints, is_fresh=False))
        live.follow(start.plan)
        trained.close()
        jobs.append(load_job(options.job))


def train_part(options: RunOptions, start: Start, jobs: list[Job], live: Live, cause: str) -> Trained:
    """Trains under one plan; ``cause`` says why it follows another one."""
    from ..runtime.train import train

    balancer = balancer_of(
        options.is_rebalanced, start.plan, jobs[0], start.costs, options.num_steps, live, start.replan
    )
    keeper = keeper_of(
        options.checkpoints,
        start.plan,
        options.epochs,
        options.initial,
        is_quiet=bool(start.rank) or options.as_json,
        may_follow=balancer is not None,
        on_saved=live.saved,
    )
    kept = options.checkpoints
    is_shared = kept is not None and options.log == kept.folder / RUN_LOG
    at_start = partial(note_faults, options.log, is_shared=is_shared)
    with live.faults_noted():
        report = train(
            jobs.pop(),
            start.plan,
            steps=options.num_steps,
            epochs=options.epochs,
            timeout_s=options.timeout_s,
            heartbeat_s=options.preparing.heartbeat_s,
            record=options.trace is not None,
            check_model=options.plan is not None,
            compile=options.preparing.compiles,
            on_nan=options.on_nan,
            keeper=keeper,
            balancer=balancer,
            initial=options.initial,
            on_start=starter(live, keeper, at_start, cause),
            on_step=live.after_step,
            on_end=writer(options.save),
        )
    return Trained(start.plan, report, keeper, balancer)


def costs_of(other: OtherPlan) -> Costs:
    """The cluster and the profile with the speeds that the devices turned out to have."""
    return lambda: (other.cluster, other.profile)


def starter(
    live: Live, keeper: RunCheckpoints | None, at_start: Callable[[], None], cause: str
) -> Callable[[], None]:
    """A function for the first step: it logs the start, with the ``cause`` of another plan, and enters the
    device."""
    from ..measure.testbed import enter_device

    def start() -> None:
        live.started(0 if keeper is None else keeper.first_step, cause)
        at_start()
        enter_device()

    return start


def note_stop(live: Live, keeper: RunCheckpoints | None) -> None:
    """Notes the signal that has ended the training, if one has."""
    if keeper is not None and keeper.stopped_by:
        live.stopped(Signals(keeper.stopped_by).name)


def writer(path: Path | None) -> Callable[[ParallelModel], None]:
    """A function that writes a model's whole weights on the first rank, if there is a path. Collective."""
    from ..runtime.first_rank import from_first_rank
    from ..runtime.saving import save_weights

    def write(model: ParallelModel) -> None:
        if path is not None:
            state = model.full_state_dict(rank0_only=True)
            from_first_rank(lambda: save_weights(state, path))

    return write


def prediction_of(options: RunOptions, plan: Plan) -> tuple[Cluster | None, Timeline | None]:
    """The cluster of a run that records a trace, and the step that the plan predicts on it, if the cluster is
    known."""
    described = None if options.trace is None else described_cluster(options.cluster)
    if described is None:
        return None, None
    from ..api import simulate

    return described, simulate(plan, described, profile=options.profile, events=True)


def described_cluster(path: Path | None) -> Cluster | None:
    """The cluster of a file, or the testbed's."""
    cluster_path = path or os.environ.get(CLUSTER_VARIABLE)
    return None if cluster_path is None else Cluster.load(cluster_path)


def described_costs(cluster: Path | None, profile: Path | None) -> tuple[Cluster | None, Profile | None]:
    """The cluster and its profile; each is None without a file."""
    from ..api import load_profile

    return described_cluster(cluster), load_profile(profile)
