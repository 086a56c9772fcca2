"""A plain training loop under a plan, with its measurements."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..base.timeline import Timeline
from ..errors import CollectiveError, JobError, MixmeshError
from ..frontend.job import check_returned
from .accelerator import peak_held_bytes
from .allocator import peak_resident_bytes
from .around_steps import Balancer, ChangesNothing, Keeper, KeepsNothing, Trained
from .comm import Comm
from .finite import FiniteGuard, OnNan
from .first_rank import everyones, largest, wait_for_all
from .job_failures import failures_of
from .memory_errors import memory_errors_named
from .parallel import ParallelModel, parallelize
from .recording import Recorder, gather_steps
from .scaler import GradScaler, unscaled_text, with_agreement
from .taking_part import taking_part
from .verdicts import END_OF_DATA

WARMUP_STEPS = 2  # steps that the median leaves out, while allocators and connections fill
RECORDED_STEPS = 3  # number of recorded steps after the warm-up


@dataclass(frozen=True)
class RunReport:
    """``step_s`` per step on the slowest rank, global ``losses``, ``peak_memory_bytes`` per rank; for a
    recorded run a timeline per recorded step; the number of steps left out because of values that are not
    finite."""

    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    timelines: tuple[Timeline, ...] = ()
    num_skipped: int = 0

    def followed_by(self, later: RunReport) -> RunReport:
        """The report of both, one after the other."""
        pairs = zip(self.peak_memory_bytes, later.peak_memory_bytes)
        return RunReport(
            self.step_s + later.step_s,
            self.losses + later.losses,
            tuple(max(pair) for pair in pairs),
            self.timelines or later.timelines,
            self.num_skipped + later.num_skipped,
        )

    @property
    def step_s_median(self) -> float:
        """The median of the steps after the warm-up, leaving out recorded steps if there are others."""
        warm = self.step_s[WARMUP_STEPS:]
        return statistics.median(warm[len(self.timelines) :] or warm or self.step_s)


def next_batch(batches: Iterator[Any], comm: Comm) -> Any:
    """The next batch, None at the end. Raises JobError, on all ranks, if the job's data raises."""
    try:
        with failures_of(f"rank {comm.rank}: the job's data", expected="batches like the job's"):
            return next(batches, None)
    except MixmeshError as error:
        if comm.watch is not None:
            comm.watch.leave(error)
        raise


def optimizer_of(job: Any) -> Any:
    """The optimizer of a job. Raises JobError if there is none, or it cannot be made."""
    with failures_of("the job's optimizer"):
        optimizer = (job.optimizer or default_optimizer)(job.model.parameters())
    check_returned(optimizer)
    return optimizer


def default_optimizer(params: Iterable) -> torch.optim.Optimizer:
    """The optimizer of a job without one."""
    return torch.optim.AdamW(params, lr=1e-3)


def scheduler_of(job: Any, optimizer: Any) -> tuple[Any, Callable[[], object]]:
    """The scheduler of a job, None without one, and its step. Raises JobError if there is
    none, and for one that is stepped by a metric, which a run does not have."""
    if job.scheduler is None:
        return None, lambda: None
    with failures_of("the job's scheduler"):
        scheduler = job.scheduler(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        raise JobError(
            "the job's scheduler function returns no scheduler",
            expected="a scheduler of torch.optim.lr_scheduler",
            got=type(scheduler).__name__,
            hint="scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)",
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError(
            "the job's scheduler is stepped by a metric, and a run has none",
            expected="a scheduler whose step() takes nothing",
            got=type(scheduler).__name__,
            hint="in a loop of your own: mixmesh.prepare, and scheduler.step(loss)",
        )

    def step() -> None:
        with failures_of("the job's scheduler"):
            scheduler.step()

    return scheduler, step


def scaler_of(job: Any, model: ParallelModel) -> GradScaler | None:
    """The scaler of a job's loss, made to agree between ranks; None if there is none or it is disabled.
    Raises JobError if a device computes bf16 in float16 while nothing scales the loss."""
    if text := unscaled_text(model.program, job.scaler):
        raise JobError(
            text,
            expected="a job with a scaler",
            got="one without" if job.scaler is None else "a scaler that is not enabled",
            hint=(
                "mixmesh.Job(..., scaler=torch.amp.GradScaler()), on CPUs GradScaler('cpu')",
                "float32 in the job's model, or a cluster file without these devices",
            ),
        )
    return with_agreement(job.scaler) if job.scaler is not None and job.scaler.is_enabled() else None


def train(
    job: Any,
    plan: Any,
    *,
    steps: int | None,
    epochs: int | None = None,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: float = 20.0,
    seed: int = 0,
    record: bool = False,
    check_model: bool = False,
    compile: bool = False,
    on_nan: OnNan = OnNan.IGNORE,
    keeper: Keeper | None = None,
    balancer: Balancer | None = None,
    initial: Callable[[ParallelModel], object] = lambda model: None,
    on_start: Callable[[], object] = lambda: None,
    on_step: Callable[[int, float, float], object] = lambda step, loss, step_s: None,
    on_end: Callable[[ParallelModel], object] = lambda model: None,
) -> RunReport:
    """Trains ``job`` under ``plan`` for at most ``steps`` steps and at most ``epochs`` epochs of its data;
    None means no limit. Collective. Afterwards the job's model is empty, and the process groups of the plan
    are gone. The report covers the steps of this start.

    ``initial`` may give the model other values before the first step; with a ``keeper`` that is the keeper's
    decision. A keeper may continue an earlier training, whose steps count, and may stop this one after any
    step; then ``on_end`` is not called. A ``balancer`` may change the shares after any step, or have the
    keeper stop the training.

    The computing thread calls ``on_start`` when all is set up, before the first step, and ``on_step`` after
    each step with its number, global loss and seconds; ``on_end`` is called on every rank with the trained
    model. With ``record`` a few steps after the warm-up are measured in detail, which needs at least one step
    more than the warm-up. With ``check_model`` rank 0 traces the model before the first step, and a model
    that is not the plan's is refused. ``compile`` is passed to ``parallelize``. ``on_nan`` decides what
    happens at a loss or gradients that are not finite; if it is to stop, that raises JobError.
    """
    # not as decorators, which would keep the job, and with it the whole batch, until the end
    with taking_part("the training"), memory_errors_named():
        model = job.model
        optimizer = optimizer_of(job)
        parallel, optimizer = parallelize(
            model,
            optimizer,
            plan,
            device=device,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            seed=seed,
            check_model=check_model,
            compile=compile,
        )
        assert optimizer is not None  # parallelize returns an optimizer if it is given one
        parallel.check_planned(job.batch)
        comm = parallel.comm
        scheduler, step_scheduler = scheduler_of(job, optimizer)
        scaler = scaler_of(job, parallel)
        keeper = keeper or KeepsNothing(plan, epochs, initial, may_follow=balancer is not None)
        balancer = balancer or ChangesNothing()
        batches, first = keeper.begin(Trained(parallel, optimizer, scheduler, scaler), job)
        del job, model  # frees the parts that this rank does not need
        balancer.begin(parallel, optimizer, batches)
        on_start()
        wait_for_all("the start of training")
        step_s: list[float] = []
        losses: list[float] = []
        recording = _Recording(parallel, is_on=record)
        is_stopped, guard = False, FiniteGuard(parallel, on_nan, scaler)
        for number in itertools.count(first) if steps is None else range(first, steps):
            started = time.perf_counter()
            with recording.span("batch"):
                batch = next_batch(batches, comm)
            if batch is None:
                with comm.call(END_OF_DATA):  # if others continue, the watch reports it
                    break
            loaded, waited_s = time.perf_counter(), comm.waits.time_s
            guard.backward(batch)
            may_step = guard.may_step(number + 1, batch)
            del batch  # freed before the next one is loaded
            recording.before_optimizer(number - first)
            with recording.span("optimizer"):
                if may_step:
                    guard.step(optimizer, step_scheduler)
                optimizer.zero_grad()
            recording.after_optimizer(number - first)
            losses.append(guard.loss(number + 1))
            step_s.append(time.perf_counter() - started)
            computing_s = time.perf_counter() - loaded
            own_s = computing_s - (comm.waits.time_s - waited_s)
            on_step(number, losses[-1], step_s[-1])
            if balancer.after_step(number + 1, computing_s, own_s):
                is_stopped = keeper.save_now(number + 1)
                if not is_stopped:
                    balancer.stay()
            is_stopped = is_stopped or keeper.after_step(number + 1)
            if is_stopped:
                break
        balancer.end()
        keeper.end(first + len(losses))
        with comm.call("the end of training"):
            peaks = everyones_peaks(comm, len(losses), steps)
        if not is_stopped:
            on_end(parallel)
        timelines = recording.finish(peaks)
        comm.close()
        return RunReport(slowest(step_s), tuple(losses), peaks, timelines, guard.num_skipped)


class _Recording:
    """Records a run, if it ``is_on``, from the optimizer's step in the last warm-up step to that in the last
    recorded step, so that whole periods lie between. ``span`` measures a part of the step."""

    def __init__(self, parallel: ParallelModel, *, is_on: bool) -> None:
        self._parallel, self._is_on = parallel, is_on
        self._recorder: Recorder | None = None
        self._open = ExitStack()
        self.span: Callable[[str], AbstractContextManager] = nullcontext

    def before_optimizer(self, number: int) -> None:
        """Begins to measure, if it is time."""
        if self._is_on and number == WARMUP_STEPS - 1:
            self._recorder = Recorder(self._parallel.comm)
            self._open.enter_context(self._parallel.recorded(self._recorder))
            self.span = self._recorder.span
            wait_for_all("the first recorded step")  # so that no rank compiles while others measure

    def after_optimizer(self, number: int) -> None:
        """Ends measuring, if it is time."""
        if number == WARMUP_STEPS - 1 + RECORDED_STEPS:
            self._open.close()
            self.span = nullcontext

    def finish(self, peak_memory_bytes: tuple[int, ...]) -> tuple[Timeline, ...]:
        """One timeline per recorded step. Collective if it is on."""
        self._open.close()
        if self._recorder is None:
            return ()
        return gather_steps(self._recorder, self._parallel.comm, peak_memory_bytes)


def slowest(step_s: list[float]) -> tuple[float, ...]:
    """Per step, the seconds of the rank that took longest."""
    if not step_s:
        return ()
    times = torch.tensor(step_s, dtype=torch.float64)
    return tuple(largest(times, "seconds of all steps").tolist())


def everyones_peaks(comm: Comm, steps_done: int, steps: int | None) -> tuple[int, ...]:
    """The peak memory of every rank in bytes. Collective. Raises CollectiveError if another rank is not at
    the end of its training, because its data was longer or it has failed."""
    try:
        return everyones(peak_memory_bytes(comm.device))
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {comm.rank} has ended its training after {steps_done} steps, others have not",
            expected="batches for equally many steps on every rank",
            got=" ".join(str(error).split())[:300],
            hint="the same data on every rank; where a rank has failed, its own output says why",
        ) from error


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU the most bytes of it that the process held, including the context and NCCL's buffers, as in a
    plan's prediction; on a CPU the process's largest resident size."""
    if device.type != "cpu":
        return peak_held_bytes(device)
    return peak_resident_bytes()
