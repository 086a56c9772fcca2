"""A plain training loop under a plan, with its measurements."""

from __future__ import annotations

import itertools
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ..base.files import PACKAGE
from ..base.timeline import Timeline
from ..errors import CollectiveError, JobError, MixmeshError
from ..lang.ir import Program
from ..lang.plan_file import Plan
from .accelerator import peak_held_bytes
from .agreement import COMPARED_STEPS
from .allocator import peak_resident_bytes
from .comm import Comm
from .data import Feed, Followed, shard_batches_by
from .finite import FiniteGuard, OnNan
from .first_rank import everyones, largest, wait_for_all
from .memory_errors import memory_errors_named
from .parallel import ParallelModel, parallelize
from .recording import Recorder, gather_steps
from .scaler import GradScaler, unscaled_text, with_agreement
from .taking_part import taking_part
from .verdicts import END_OF_DATA

WARMUP_STEPS = 2  # steps that the median leaves out, while allocators and connections fill
RECORDED_STEPS = 3  # number of recorded steps after the warm-up
# PyTorch's error for a worker begins like this, and contains its traceback
OF_WORKER = "in DataLoader worker process"
FRAME = re.compile(r'File "([^"]+)", line ([0-9]+), in .*\n\s*(.*)')
Span = Callable[[str], AbstractContextManager]


class Trained(NamedTuple):
    """The parts of a training that its steps change. ``scheduler`` and ``scaler`` may be None."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: GradScaler | None


class Keeper(Protocol):
    """Keeps the state of a training, so that another start can continue it. All calls are collective."""

    def begin(self, trained: Trained, job: Any) -> tuple[Feed, int]:
        """This rank's batches, and the number of steps made before this start."""

    def after_step(self, num_steps: int) -> bool:
        """Called after ``num_steps`` steps in all; returns whether the training should stop."""

    def save_now(self, num_steps: int) -> bool:
        """Keeps the state after ``num_steps`` steps; returns whether that was possible."""

    def end(self, num_steps: int) -> None:
        """Called after the last step."""


class Balancer(Protocol):
    """Adapts the shares of a training to the speeds of its devices. All calls are collective."""

    def begin(self, model: ParallelModel, optimizer: torch.optim.Optimizer, feed: Feed) -> None:
        """Called before the first step of this start."""

    def after_step(self, num_steps: int, step_s: float, own_s: float) -> bool:
        """Called after ``num_steps`` steps in all. The last took ``step_s`` seconds without loading its
        batch, of which this rank spent ``own_s`` not waiting for others. Returns True if the training should
        stop here and continue from its kept state under another plan."""

    def stay(self) -> None:
        """Called if the training cannot stop, because its state could not be kept."""

    def end(self) -> None:
        """Called after the last step."""


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


def endless(batches: Iterable | None, batch: Any, epochs: int | None = None) -> Iterator[Any]:
    """Repeats ``batches``, or ``batch`` if there are none, forever or for ``epochs`` epochs."""
    times = () if epochs is None else (epochs,)
    if batches is None:
        return itertools.repeat(batch, *times)
    if iter(batches) is batches:
        return iter(batches)  # an iterator runs once
    return Passes(itertools.repeat(batches, *times))


class Passes(Iterator[Any]):
    """The batches of consecutive passes over data. Two passes in a row without a batch are the end: one may
    be the rest of an epoch that was read before, but data that has no more would be asked forever. It is a
    class, because a generator's frame would keep each batch alive."""

    def __init__(self, passes: Iterable[Iterable]) -> None:
        self._passes = iter(passes)
        self._current: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        for batch in self._current:
            return batch
        for _ in range(2):
            self._current = iter(next(self._passes))
            for batch in self._current:
                return batch
        raise StopIteration


def next_batch(batches: Iterator[Any], comm: Comm) -> Any:
    """The next batch, None at the end. Raises JobError, on all ranks, if the job's data raises."""
    try:
        with failures_of(f"rank {comm.rank}: the job's data", expected="batches like the job's"):
            return next(batches, None)
    except MixmeshError as error:
        if comm.watch is not None:
            comm.watch.leave(error)
        raise


def place_of(error: BaseException) -> str:
    """The file and line where an error was raised: the last one outside of libraries if there is one."""
    frames = [(f.filename, f.lineno, f.line) for f in traceback.extract_tb(error.__traceback__)]
    if OF_WORKER in str(error):
        frames = FRAME.findall(str(error)) or frames
    own = [f for f in frames if "site-packages" not in f[0] and not f[0].startswith(str(PACKAGE))]
    file, number, line = (own or frames)[-1]
    return f"{file}:{number}, {line}"


def named_line(error: BaseException) -> str:
    """The class and the first line of an error. For an error of a DataLoader's worker it is the last line,
    which has both."""
    if OF_WORKER in str(error):
        return str(error).strip().splitlines()[-1][:300]
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


class ComparesFirst:
    """Compares the first whole batches of all ranks, because ranks whose data is in another order would train
    on other samples. Collective."""

    def __init__(self, model: ParallelModel) -> None:
        self._model, self._num_left = model, COMPARED_STEPS

    def __call__(self, batch: Any) -> Any:
        if self._num_left and isinstance(batch, Mapping | tuple | list):
            self._num_left -= 1
            self._model.compare(batch)
        return batch


def own_batches(
    job: Any,
    plan: Plan | Program,
    rank: int,
    epochs: int | None = None,
    look: Callable[[Any], Any] = lambda batch: batch,
    *,
    may_follow: bool = False,
) -> Feed:
    """This rank's share of the job's batches; none is a view that would keep the whole batch alive. ``look``
    gets each batch before it is cut, and returns it. A job without data has one batch, which is cut once:
    another plan may follow only if ``may_follow`` is set, because then each rank keeps the whole batch."""
    followed = Followed(plan)
    share = partial(shard_batches_by, followed, rank=rank, model=job.model)
    if job.data is not None:
        return Feed(map(owned, share(map(look, endless(job.data, None, epochs)))), followed.follow)
    if may_follow:
        return Feed(map(owned, share(endless(None, look(job.batch), epochs))), followed.follow)
    return Feed(endless(None, owned(next(share([look(job.batch)]))), epochs))


def owned(batch: Any) -> Any:
    """The batch, with copies of tensors that are pieces of larger ones."""

    def copied(t: Any) -> Any:
        part = isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() > t.nbytes
        return t.clone(memory_format=torch.contiguous_format) if part else t

    if isinstance(batch, dict):
        return {k: copied(v) for k, v in batch.items()}
    return tuple(map(copied, batch))


@contextmanager
def failures_of(part: str, *, expected: str = "") -> Iterator[None]:
    """A context in which an error raised by a ``part`` of the job becomes a JobError with the user's line."""
    try:
        yield
    except MixmeshError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{part} raised {named_line(error)}",
            expected=expected,
            where=place_of(error),
            hint="mixmesh --debug run ... shows the traceback",
        ) from error


def optimizer_of(job: Any) -> Any:
    """The optimizer of a job. Raises JobError if there is none, or it cannot be made."""
    with failures_of("the job's optimizer"):
        optimizer = (job.optimizer or default_optimizer)(job.model.parameters())
    if optimizer is None:
        raise JobError(
            "the job's optimizer function returns None",
            expected="an optimizer of torch.optim",
            hint="optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
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
        first = 0
        if keeper is None:
            initial(parallel)
            look, may_follow = ComparesFirst(parallel), balancer is not None
            batches = own_batches(job, plan, comm.rank, epochs, look, may_follow=may_follow)
        else:
            batches, first = keeper.begin(Trained(parallel, optimizer, scheduler, scaler), job)
        del job, model  # frees the parts that this rank does not need
        if balancer is not None:
            balancer.begin(parallel, optimizer, batches)
        on_start()
        wait_for_all("the start of training")
        step_s: list[float] = []
        losses: list[float] = []
        recording = _Recording(parallel) if record else None
        span: Span = nullcontext
        is_stopped, guard = False, FiniteGuard(parallel, on_nan, scaler)
        for number in itertools.count(first) if steps is None else range(first, steps):
            started = time.perf_counter()
            with span("batch"):
                batch = next_batch(batches, comm)
            if batch is None:
                with comm.call(END_OF_DATA):  # if others continue, the watch reports it
                    break
            loaded, waited_s = time.perf_counter(), comm.waits.time_s
            guard.backward(batch)
            may_step = guard.may_step(number + 1, batch)
            del batch  # freed before the next one is loaded
            if recording is not None:
                span = recording.before_optimizer(number - first)
            with span("optimizer"):
                if may_step:
                    guard.step(optimizer, step_scheduler)
                optimizer.zero_grad()
            if recording is not None:
                span = recording.after_optimizer(number - first)
            losses.append(guard.loss(number + 1))
            step_s.append(time.perf_counter() - started)
            computing_s = time.perf_counter() - loaded
            own_s = computing_s - (comm.waits.time_s - waited_s)
            on_step(number, losses[-1], step_s[-1])
            if balancer is not None and balancer.after_step(number + 1, computing_s, own_s):
                is_stopped = keeper is not None and keeper.save_now(number + 1)
                if not is_stopped:
                    balancer.stay()
            is_stopped = is_stopped or keeper is not None and keeper.after_step(number + 1)
            if is_stopped:
                break
        if balancer is not None:
            balancer.end()
        if keeper is not None:
            keeper.end(first + len(losses))
        with comm.call("the end of training"):
            peaks = everyones_peaks(comm, len(losses), steps)
        if not is_stopped:
            on_end(parallel)
        timelines = () if recording is None else recording.finish(peaks)
        comm.close()
        return RunReport(slowest(step_s), tuple(losses), peaks, timelines, guard.num_skipped)


class _Recording:
    """Records a run from the optimizer's step in the last warm-up step to that in the last recorded step, so
    that whole periods lie between."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel = parallel
        self._recorder: Recorder | None = None
        self._open = ExitStack()
        self._span: Span = nullcontext

    def before_optimizer(self, number: int) -> Span:
        """The spans by which to measure from here on."""
        if number == WARMUP_STEPS - 1:
            self._recorder = Recorder(self._parallel.comm)
            self._open.enter_context(self._parallel.recorded(self._recorder))
            self._span = self._recorder.span
            wait_for_all("the first recorded step")  # so that no rank compiles while others measure
        return self._span

    def after_optimizer(self, number: int) -> Span:
        if number == WARMUP_STEPS - 1 + RECORDED_STEPS:
            self._open.close()
            self._span = nullcontext
        return self._span

    def finish(self, peak_memory_bytes: tuple[int, ...]) -> tuple[Timeline, ...]:
        """One timeline per recorded step. Collective."""
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
