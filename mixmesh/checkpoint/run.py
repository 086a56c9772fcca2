"""Checkpoints of ``mixmesh run``: when to write them, and which one to resume from."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.units import plural
from ..errors import InputError
from ..lang.plan_file import Plan
from ..runtime.agreement import COMPARED_STEPS
from ..runtime.around_steps import Trained
from ..runtime.data import Feed
from ..runtime.job_data import Passes, own_batches, owned
from ..runtime.parallel import ParallelModel
from ..training.preparation.alike import HINTS, check_digests
from ..training.preparation.loading import own_loader
from ..training.preparation.own_loader import OwnIterator, OwnLoader
from .background import Saving
from .loading import load
from .manifest import check_is_alone, check_is_no_checkpoint, checkpoints_in, newest_number, number_of
from .ranks import Ranks
from .saving import save, save_async
from .signals import OF_SIGNAL, Signals
from .state import state_bytes
from .vote import Vote

RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
MOST_DEVICES = "most_devices"  # the key in ``extra`` of a checkpoint
EVERY = re.compile(r"(\d+)(s?)")


@dataclass(frozen=True)
class Every:
    """The interval in steps or in seconds; the other field is 0."""

    steps: int = 0
    time_s: int = 0

    @classmethod
    def parse(cls, text: str) -> Every:
        """Parses an interval: ``50`` means steps, ``600s`` seconds. Raises InputError for anything else."""
        parts = EVERY.fullmatch(text)
        if parts is None or not int(parts[1]):
            raise InputError(
                "how often checkpoints are written cannot be read",
                expected="steps, as --every 50, or seconds, as --every 600s",
                got=f"--every {text}",
                hint=_every_hint(text),
            )
        count = int(parts[1])
        return cls(time_s=count) if parts[2] else cls(steps=count)


def _every_hint(text: str) -> str:
    """The option in seconds for an interval in minutes or hours; an example for any other text."""
    parts = re.fullmatch(r"(\d+) ?(m|h)[a-z]*", text.strip())
    return f"--every {int(parts[1]) * {'m': 60, 'h': 3600}[parts[2]]}s" if parts else "--every 600s"


@dataclass(frozen=True)
class Settings:
    """Where and how often checkpoints are written, how many are kept, and whether to start over."""

    folder: Path
    every: Every
    keep: int
    is_fresh: bool = False

    def check_folder(self) -> None:
        """Raises InputError if the folder is not writable, or is itself a checkpoint: before the training
        rather than during it."""
        check_is_no_checkpoint(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable("a file" if self.folder.is_file() else str(error.strerror)) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise self._unwritable("no permission to write there")

    def _unwritable(self, got: str) -> InputError:
        return InputError(
            "checkpoints cannot be written there",
            expected="a folder that may be written to; it is made if it is not there",
            got=got,
            where=str(self.folder),
            hint="--checkpoint DIR with another folder",
        )


class RunCheckpoints:
    """The checkpoints of one run: ``begin`` before its first step, ``after_step`` after each, ``end`` after
    the last one. All three are collective."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        epochs: int | None,
        say: Callable[[str], None],
        initial: Callable[[ParallelModel], object] = lambda model: None,
        *,
        may_follow: bool = False,
        on_saved: Callable[[int], object] = lambda step: None,
    ) -> None:
        """``initial`` is called with the model if there is no checkpoint to resume. ``may_follow``: another
        plan of the same form may follow during the training. ``on_saved`` is called with the step of every
        complete checkpoint."""
        self._on_saved = on_saved
        self._settings, self._plan, self._epochs, self._say = settings, plan, epochs, say
        self._initial, self._may_follow = initial, may_follow
        self._open = ExitStack()
        self._saved_step = -1
        self._ended_at = -1  # the number of steps at the end
        self._saving: tuple[int, Saving] | None = None  # the checkpoint being written, with its step
        self._has_room: bool | None = None  # whether all ranks have memory for copies
        self.held_s = 0.0  # seconds that checkpoints have held up the training
        self.first_step = 0  # how many were made before this start
        self.stopped_by = 0  # the number of the signal that ended the run

    def begin(self, trained: Trained, job: Any) -> tuple[Feed, int]:
        """This rank's remaining batches, and the number of steps that were made before this start. Raises
        InputError for data from which a training cannot resume."""
        self._trained = trained
        self._most_devices = trained.model.comm.world_size  # the most of any start so far
        # compared before each checkpoint only, because comparing every batch takes a message
        self._loader = None if job.data is None else own_loader(job.data, self._plan, is_compared=False)
        if isinstance(self._loader, OwnIterator):
            self._loader.state_dict()  # raises its error now rather than at the first checkpoint
        if self._settings.is_fresh or not self._go_on():
            self._initial(trained.model)
        self._number = self._newest_number()  # number of the newest checkpoint that this training knows
        self._signals = self._open.enter_context(Signals())
        ranks = Ranks.of(trained.model)
        ranks.ends_when_told(self._signals)
        self._vote = Vote(ranks)
        self._saved_at = time.monotonic()
        return self._batches(job), self.first_step

    def _go_on(self) -> bool:
        loaded = load(self._settings.folder, **self._parts())
        ranks = Ranks.of(self._model)
        # every machine counts its own restarts
        restart = max(ranks.everyones(int(os.environ.get(RESTART_VARIABLE, "0"))))
        start = f"restart {restart}: " if restart else ""
        if loaded is None:
            if restart:
                self._say(
                    f"{start}{plural(ranks.world_size, 'device')}, no checkpoint yet: starting from scratch"
                )
            return False
        self.first_step = self._saved_step = loaded.step
        self._most_devices = max(ranks.world_size, loaded.extra.get(MOST_DEVICES, 0))
        devices = f"{ranks.world_size} of {plural(self._most_devices, 'device')}"
        self._say(f"{start}{devices}, going on after step {loaded.step}, from {loaded.path}")
        return True

    @property
    def _model(self) -> ParallelModel:
        return self._trained.model

    def _parts(self) -> dict[str, Any]:
        return {**self._trained._asdict(), "loader": self._loader}

    def _batches(self, job: Any) -> Feed:
        if self._loader is not None:
            batches = map(owned, Passes(_epochs(self._loader, self._epochs)))
            return Feed(batches, self._loader.follow, self._loader.num_ahead)
        # a single batch that is repeated: every step is an epoch
        left = None if self._epochs is None else max(self._epochs - self.first_step, 0)
        return own_batches(job, self._plan, self._model.comm.rank, left, may_follow=self._may_follow)

    def after_step(self, num_steps: int) -> bool:
        """Called after ``num_steps`` steps in all: saves if it is time to. Returns whether the run should
        stop here."""
        started = time.monotonic()
        if num_steps - self.first_step <= COMPARED_STEPS:
            self._finish()
            self._check_data()
        every = self._settings.every
        is_time = bool(every.time_s and time.monotonic() - self._saved_at >= every.time_s)
        # the first rank's clock counts
        is_due, self.stopped_by = self._vote.cast(
            int(is_time and not self._model.comm.rank), self._signals.number
        )
        if is_due or self.stopped_by or (every.steps and num_steps % every.steps == 0):
            self._begin(num_steps)
        self.held_s += time.monotonic() - started
        return bool(self.stopped_by)

    def _check_data(self) -> None:
        """Raises InputError on all ranks if they have not read the same batches since the epoch began."""
        if self._loader is not None:
            read = self._loader.state_dict()
            own = f"{read['epoch']} {read['num_yielded']} {read['digest']}"
            check_digests(Ranks.of(self._model).everyones(own), *HINTS)

    def _begin(self, num_steps: int) -> None:
        """Saves in the background, or before the training goes on if memory has no room for copies."""
        self._finish()
        self._check_data()
        self._check_alone()
        self._saved_at = time.monotonic()
        if not self._check_room():
            self._save(num_steps)
            return
        self._saving = num_steps, save_async(self._settings.folder, **self._kept(num_steps), **self._parts())

    def _check_room(self) -> bool:
        """Whether every rank has room for copies: always on GPUs, whose copies are in host memory, and on
        CPUs if the plan leaves enough memory."""
        if self._has_room is None:
            rank, plan = self._model.comm.rank, self._model._runtime.forms.plan
            is_predicted = bool(plan.usable_bytes and plan.predicted_peak_memory_bytes)
            has_room = True
            if self._model.comm.device.type == "cpu" and is_predicted:
                left = plan.usable_bytes[rank] - plan.predicted_peak_memory_bytes[rank]
                has_room = state_bytes(self._model, self._trained.optimizer) <= left
            self._has_room = all(Ranks.of(self._model).everyones(has_room))
        return self._has_room

    def _finish(self) -> None:
        """Waits for the checkpoint that is under way."""
        if self._saving is not None:
            (num_steps, saving), self._saving = self._saving, None
            self._note(saving.result(), num_steps)

    def _save(self, num_steps: int) -> None:
        self._note(save(self._settings.folder, **self._kept(num_steps), **self._parts()), num_steps)

    def _note(self, path: Path | None, num_steps: int) -> None:
        """Notes the checkpoint after ``num_steps`` steps, if it could be written."""
        if path is not None:
            self._saved_step, self._number = num_steps, number_of(path)
            self._on_saved(num_steps)

    def _newest_number(self) -> int:
        """The number of the newest checkpoint in the folder, 0 for none. Collective."""
        folder = self._settings.folder
        return Ranks.of(self._model).from_first(lambda: newest_number(folder))

    def _check_alone(self) -> None:
        """Raises InputError, on all ranks, if another training has written to the folder. torchrun may
        continue with two groups, each with a part of the machines, if its own heartbeats come too late."""
        folder, known = self._settings.folder, self._number
        Ranks.of(self._model).from_first(lambda: check_is_alone(folder, known))

    def _kept(self, num_steps: int) -> dict[str, Any]:
        extra = {MOST_DEVICES: self._most_devices}
        return {"step": num_steps, "keep": self._settings.keep, "extra": extra}

    def save_now(self, num_steps: int) -> bool:
        """Waits for the checkpoint that is being written, and saves what was trained since. Returns whether
        the state after ``num_steps`` steps is saved. Notes a signal that has come on any rank."""
        started = time.monotonic()
        self._save_rest(num_steps)
        self.stopped_by = self.stopped_by or max(Ranks.of(self._model).everyones(self._signals.number))
        self.held_s += time.monotonic() - started
        return num_steps == self._saved_step

    def goes_on_from(self, earlier: RunCheckpoints) -> None:
        """Takes over the number of steps and the seconds of delay from an ``earlier`` part of the same
        start."""
        self.first_step = earlier.first_step
        self.held_s += earlier.held_s

    def end(self, num_steps: int) -> None:
        """Waits for the checkpoint that is being written, and saves what was trained since."""
        started = time.monotonic()
        self._ended_at = num_steps
        self._vote.finish()
        self._save_rest(num_steps)
        self.held_s += time.monotonic() - started

    def _save_rest(self, num_steps: int) -> None:
        self._finish()
        if num_steps != self._saved_step:
            self._check_data()
            self._check_alone()
            self._save(num_steps)

    def close(self) -> int:
        """Restores the signal handlers. Returns the exit status: 128 plus the number of the signal that
        stopped the run, or 0."""
        self._open.close()
        del self._trained, self._loader
        return OF_SIGNAL + self.stopped_by if self.stopped_by else 0

    def figures(self) -> dict[str, float]:
        """The number of the first step of this start, and the seconds for which checkpoints held up the
        training."""
        return {"first_step": self.first_step + 1, "checkpoint_s": self.held_s}

    @property
    def is_saved(self) -> bool:
        """Whether the state after the last step is in a checkpoint."""
        return self._ended_at == self._saved_step

    def summary(self) -> str:
        """A line that says how the run ended and where its state is."""
        newest = next(iter(checkpoints_in(self._settings.folder)), None)
        where = "no checkpoint was written" if newest is None else f"checkpoint {newest}"
        if not self.is_saved:
            lost = f"what was trained after step {max(self._saved_step, 0)} is in no checkpoint"
            where += f"; {lost}, and the same command trains it again"
        where += f"; checkpoints have held up the training for {self.held_s:.3g} s"
        if not self.stopped_by:
            return where
        name = signal.Signals(self.stopped_by).name
        return f"stopped by {name}, and the same command goes on: {where}"


def _epochs(loader: OwnLoader, epochs: int | None) -> Iterator[Iterable]:
    while epochs is None or loader.state_dict()["epoch"] < epochs:
        yield loader
