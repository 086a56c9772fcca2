"""The progress of ``mixmesh run``: a bar or lines, a file of JSON lines, TensorBoard."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.files import drop_cut_off_line
from ..base.progress import say, tell
from ..base.run_log import CHECKPOINT, FAULT, OWN, PLAN, SHARES, START, STOP, mark_line, step_line
from ..base.units import number_text
from ..errors import InputError, unwritable
from .launch import meet
from .output import seconds

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..lang.plan_file import Plan

MOST_TOLD = 300  # characters shown of an error
MOST_LAGS = 8  # ranks listed with their lags
LAST_STEPS = 20  # steps over which the current speed is a median
PrintEvery = Annotated[
    int, typer.Option("--print-every", min=1, metavar="N", help="Without a terminal, a line every N steps.")
]
LogJson = Annotated[
    Path | None,
    typer.Option(
        "--log-json",
        metavar="FILE",
        help="Add a JSON object to this file for every step; with --checkpoint DIR it is DIR/run.jsonl.",
    ),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="DIR", help="Write loss and throughput there for TensorBoard."),
]


@dataclass(frozen=True)
class Step:
    """The figures of one step: its ``number`` from 1, the global loss, its seconds on this rank, and the
    samples per second of all ranks (None for a job without samples)."""

    number: int
    loss: float
    step_s: float
    samples_per_s: float | None


def check_targets(log: Path | None, folder: Path | None, timeout_s: float) -> None:
    """Raises InputError on all ranks if the first one cannot write the log file or for TensorBoard, before
    planning begins. Collective if there is either."""
    if log is None and folder is None:
        return
    from ..runtime.first_rank import from_first_rank

    def check() -> None:
        for place in filter(None, (log, folder)):
            try:
                if place is log:
                    place.open("a").close()
                else:
                    place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                what = "the log" if place is log else "the folder for TensorBoard"
                raise unwritable(what, place, error) from None
        if folder is not None:
            summary_writer()

    meet(timeout_s)
    from_first_rank(check)


def summary_writer() -> Callable[..., Any]:
    """A PyTorch SummaryWriter for TensorBoard. Raises InputError if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "TensorBoard is not installed", expected="the package tensorboard", hint="pip install tensorboard"
        ) from None
    return SummaryWriter


class _Log:
    """A file of lines. If it cannot be written any more, for instance because the disk is full, the training
    goes on without it."""

    def __init__(self, path: Path) -> None:
        # unbuffered: the rest of a buffer would be written again when the file is closed
        drop_cut_off_line(path)
        self._path, self._file = path, path.open("ab", buffering=0)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, line: str) -> None:
        if self._file.closed:
            return
        rest = line.encode()
        try:
            while rest:  # a disk with little room takes a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            tell(f"warning: {self._path} is not written any more: {error.strerror}")
            self._file.close()
            drop_cut_off_line(self._path)


class Live:
    """Reports the progress of a training on the first rank, until ``close``. ``samples`` is the size of a
    global batch and ``num_steps`` the number of all steps, None if unknown. ``goes_to`` are the file of JSON
    lines and TensorBoard's folder, or None."""

    def __init__(
        self,
        plan: Plan,
        samples: int | None,
        num_steps: int | None,
        goes_to: tuple[Path | None, Path | None] = (None, None),
        *,
        is_quiet: bool,
        print_every: int = 1,
    ) -> None:
        log, folder = goes_to
        self._plan, self._samples, self._num_steps, self._every = plan, samples, num_steps, print_every
        self._open = ExitStack()
        self._times: deque[float] = deque(maxlen=LAST_STEPS)
        self._log = None if log is None else self._open.enter_context(_Log(log))
        self._board = None if folder is None else self._open.enter_context(summary_writer()(str(folder)))
        self._is_quiet = is_quiet
        self._update: Callable[[Step], None] | None = None  # updates the bar, if there is one
        self._num_steps_made = 0
        self._own_s: tuple[float, ...] = ()  # seconds of each rank in the last window

    def mark(self, event: str, step: int, **facts: Any) -> None:
        """Logs an event after ``step`` steps in the file of JSON lines."""
        if self._log is not None:
            self._log.write(mark_line(event, step, time.time(), **facts))

    def started(self, step: int, cause: str = "") -> None:
        """Logs that the training begins or resumes after ``step`` steps. If it resumes in the same processes
        under another plan, ``cause`` is the reason for that."""
        plan = self._plan
        self._num_steps_made = step
        facts = {"world_size": plan.program.world_size, "planner": plan.planner, "bound_s": plan.bound_s}
        facts |= {"predicted_step_s": plan.predicted_step_s, **({"cause": cause} if cause else {})}
        self.mark(PLAN if cause else START, step, **facts)

    def follow(self, plan: Plan) -> None:
        """Reports on another plan from here on."""
        self._plan = plan

    def saved(self, step: int) -> None:
        """Logs a checkpoint after ``step`` steps."""
        self.mark(CHECKPOINT, step)

    def shares_changed(self, step: int, pause_s: float, cause: str) -> None:
        """Logs a change of shares after ``step`` steps, and how long it stopped the training."""
        self.mark(SHARES, step, pause_s=pause_s, cause=cause)

    @contextmanager
    def faults_noted(self) -> Iterator[None]:
        """A context that logs an error that ends the training, and raises it again."""
        try:
            yield
        except Exception as error:
            why = str(getattr(error, "message", "") or error)
            self.mark(FAULT, self._num_steps_made, why=why[:MOST_TOLD])
            raise

    def stopped(self, signal_name: str) -> None:
        """Notes that a signal has ended the training."""
        self.mark(STOP, self._num_steps_made, cause=signal_name)

    def own_seconds(self, step: int, own_s: Sequence[float]) -> None:
        """Logs the seconds of a step in which each rank did not wait."""
        self._own_s = tuple(own_s)
        self.mark(OWN, step, own_s=list(own_s))

    def after_step(self, number: int, loss: float, step_s: float) -> None:
        """Reports the step ``number``, counted from 0."""
        self._times.append(step_s)
        self._num_steps_made = number + 1
        samples_per_s = None if self._samples is None or step_s <= 0 else self._samples / step_s
        step = Step(number + 1, loss, step_s, samples_per_s)
        if self._log is not None:
            self._log.write(step_line(step.number, loss, step_s, samples_per_s, time.time()))
        if self._board is not None:
            self._board.add_scalar("loss", loss, step.number)
            self._board.add_scalar("step_s", step_s, step.number)
            if samples_per_s is not None:
                self._board.add_scalar("samples_per_s", samples_per_s, step.number)
        if self._is_quiet:
            return
        if sys.stdout is not None and sys.stdout.isatty():
            with suppress(OSError):  # the terminal was closed
                self._show(step)
        elif step.number % self._every == 0 or step.number == self._num_steps:
            say(self.line(step))

    def line(self, step: Step) -> str:
        """Formats a step: ``step 20  loss 1.81  312 ms  103 samples/s  96% of the bound  lag 0 / 12 ms  2 min
        left``. The lag of a rank is by how much longer it works on a step than the fastest one."""
        parts = [f"step {step.number}", f"loss {step.loss:.5g}", seconds(step.step_s)]
        if step.samples_per_s is not None:
            parts.append(f"{number_text(step.samples_per_s)} samples/s")
        now_s = statistics.median(self._times)
        if self._plan.bound_s:
            parts.append(f"{self._plan.bound_s / now_s:.0%} of the bound")
        if self._own_s:
            parts.append(lag_text(self._own_s))
        if self._num_steps is not None and step.number < self._num_steps:
            parts.append(f"{left_text((self._num_steps - step.number) * now_s)} left")
        return "  ".join(parts)

    def _show(self, step: Step) -> None:
        """Shows a bar at the bottom of the terminal while training runs."""
        if self._update is None:
            self._update = self._start_bar()
        self._update(step)

    def _start_bar(self) -> Callable[[Step], None]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        bar = Progress(*columns)
        bar.start()
        self._open.callback(_end_bar, bar)
        task = bar.add_task("", total=self._num_steps)
        return lambda step: bar.update(task, completed=step.number, description=self.line(step))

    def close(self) -> None:
        """Ends the bar and closes the files."""
        self._open.close()


def _end_bar(bar: Progress) -> None:
    """Leaves the bar in the terminal as it is, unless the terminal was closed."""
    with suppress(OSError):
        bar.stop()


def lag_text(own_s: Sequence[float]) -> str:
    """For each rank, how much longer it works on a step than the fastest; if there are many ranks, only for
    the slowest."""
    lags_s = [time_s - min(own_s) for time_s in own_s]
    if len(lags_s) <= MOST_LAGS:
        return f"lag {' / '.join(f'{1e3 * lag_s:.0f}' for lag_s in lags_s)} ms"
    last = max(range(len(lags_s)), key=lags_s.__getitem__)
    return f"rank {last} lags {seconds(lags_s[last])}"


def left_text(time_s: float) -> str:
    """Formats a remaining time for people: ``40 s``, ``12 min``, ``3.5 h``."""
    if time_s < 100:
        return f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 6000 else f"{number_text(time_s / 3600)} h"
