"""This rank's part of a script's loader, with its position, so that another start can resume from it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ...base.progress import warn_once
from ...errors import InputError
from ...lang.ir import Program
from ...lang.plan_file import Plan
from ...runtime.data import Followed, own_rows, shard_batches_by
from ...runtime.first_rank import everyones, from_first_rank
from ...runtime.given import begin_epoch, count_dealt, count_given
from ...runtime.passes import Runtime
from ...runtime.verdicts import START_OF_EPOCH
from ...runtime.watch import in_call
from .alike import digest, digested, same_on_all
from .drawn import DrawWatch
from .draws_of_rows import RowDraws
from .lengths import length
from .own_batches import OwnBatches
from .own_rows import RowWatch
from .queues import keep_queues
from .resuming import (
    Numbers,
    Progress,
    Resume,
    check_skipped,
    numbers_of_process,
    set_numbers_of_process,
    skip,
)

IN_A_THREAD = (
    "mixmesh: the loader that prepare returned is read in another thread than the one that prepared: ranks "
    "compare what they read, and these messages may cross those of the training, so that ranks wait for each "
    "other; put the thread into the loader before prepare, or use DataLoader(num_workers=...)"
)


class Counted:
    """An iterator over ``batches`` that reports before each batch is requested, when it has arrived, and the
    end; each is requested within the context ``around``. It is not a generator, whose frame would keep the
    batch alive."""

    def __init__(
        self,
        batches: Iterator[Any],
        on_batch: Callable[[Any], Any],
        on_end: Callable[[], object],
        before: Callable[[], object] = lambda: None,
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.batches, self.on_batch, self.on_end = batches, on_batch, on_end
        self.before, self.around = before, around

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.before()
        try:
            with self.around():
                batch = next(self.batches)
            return self.on_batch(batch)
        except StopIteration:
            self.on_end()
            raise


class LoopWatch(Protocol):
    """Watches the loop that reads a loader. All its methods are called between two batches."""

    def before_batch(self) -> None:
        """Called before a batch is requested, on all ranks alike."""

    def on_batch(self) -> None:
        """Called when the batch has arrived."""


class OwnLoader:
    """A script's loader, giving this rank's part of every batch. ``set_epoch`` goes to the script's sampler;
    every other attribute is that of the script's loader.

    ``state_dict`` records the progress, the same on every rank, and after ``load_state_dict`` the next
    iteration gives the remaining batches, on any number of ranks. Several iterations may run at the same
    time; the state is that of the one that gave the last batch.
    """

    def __init__(
        self,
        loader: Iterable,
        own: Iterable,
        plan: Plan | None,
        *,
        is_whole: bool,
        is_compared: bool = True,
        draws_apart: bool = False,
    ) -> None:
        self._loader, self._own, self._plan, self._is_whole = loader, own, plan, is_whole
        # cuts whole batches, if that is requested
        self._cut_by: Followed[Plan | Program] | None = None
        if is_whole and plan is not None:
            self._cut_by = Followed(plan)
        # ranks load different rows, which may draw random numbers
        self._draws_apart = draws_apart and not getattr(own, "num_workers", 0) and dist.get_world_size() > 1
        self.draws = DrawWatch()
        self._rows: RowWatch | None = None
        self.watch: LoopWatch | None = None
        self.num_old = 0  # number of batches that are still to be given by the previous plan
        self.is_single = True  # whether no two iterations have run at the same time
        self._open: WeakSet[Counted] = WeakSet()  # iterations that have not ended
        self._is_compared = is_compared  # whether batches are compared between ranks
        sampler = getattr(own, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, OwnBatches) else None  # present for data with indices
        self._progress, self._is_resumed = Progress(), False
        self._resume: Resume | None = None  # the point at which the current iteration resumed
        self._thread = threading.get_ident()

    def __iter__(self) -> Iterator[Any]:
        if threading.get_ident() != self._thread and dist.get_world_size() > 1:
            warn_once(IN_A_THREAD)
        if self.watch is not None:
            self._settle()
        with in_call(START_OF_EPOCH):
            self._resume = from_first_rank(self._next_resume)
        begin_epoch()
        resumed = replace(self._resume.state) if self._resume is not None else None
        self._is_resumed = False
        self._progress = replace(self._progress)  # a copy, because another iteration may still run and count
        self._progress.begin(resumed)
        in_middle = resumed if resumed is not None and resumed.num_yielded else None
        if resumed is not None and in_middle is None and resumed.numbers is not None:
            resumed.numbers.restore(self._loader)
        batches = (
            self._whole(in_middle) if self._sampler is None else self._by_indices(self._sampler, in_middle)
        )
        own = batches
        if self._cut_by is not None:
            own = shard_batches_by(self._cut_by, batches, dist.get_rank(), cuts_others=True)
        watched = own if self._rows is None else self._rows.watching(iter(own))
        return self._told(self.draws.watching(iter(watched)))

    def watch_rows(self, runtime: Runtime) -> None:
        """Starts to notice what the loop does to batches before it calls the model with them."""
        assert self._plan is not None  # it exists wherever a model is called
        rows = self._rows = RowWatch(self._plan, dist.get_rank())

        def before_call(args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
            self.draws.on_call()
            return rows.on_call(args, kwargs)

        runtime.before_call = before_call

    def _told(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the same batches, and reports them to the watch on the loop."""
        watch = self.watch
        if watch is None:
            return batches

        def count(batch: Any) -> Any:
            self.num_old = max(self.num_old - 1, 0)
            watch.on_batch()
            return batch

        watched = Counted(batches, count, self._open.clear, watch.before_batch)
        self._open.add(watched)
        return watched

    def _settle(self) -> None:
        """Cuts a new iteration by the plan that was to follow; batches that the one before has loaded but not
        given are left out."""
        self.is_single = self.is_single and not self._open
        self.num_old = 0
        if self._cut_by is not None:
            self._cut_by.settle()
        if self._sampler is not None:
            self._sampler.settle()

    @property
    def num_ahead(self) -> int:
        """The number of batches that any rank may be loading before they are requested, the same on all."""
        return 0 if self._sampler is None else self._sampler.ahead

    def follow(self, plan: Plan) -> None:
        """Makes another plan of the same form cut the batches after the next ``num_ahead`` ones. Every rank
        calls it after the same batch."""
        self._plan, self.num_old = plan, self.num_ahead
        if self._cut_by is not None:
            self._cut_by.follow(plan, self.num_ahead)
        if self._sampler is not None and not self._is_whole:
            self._sampler.follow(partial(own_rows, plan.program, dist.get_rank()))

    def _next_resume(self) -> Resume | None:
        """The point at which the next iteration continues; None if it starts over."""
        if self._is_resumed:
            return Resume(replace(self._progress))
        return self._resume.after_look() if self._resume is not None and self._was_look() else None

    def _was_look(self) -> bool:
        """Whether the loop took only the first batches of a resumed epoch, as a look at the data, and then
        left the iteration."""
        return self._resume is not None and self._resume.was_left_at(self._progress)

    def _advance(self, progress: Progress, num_samples: int, of: str) -> None:
        """Counts a batch of ``num_samples`` and the digest ``of`` it, which the loop is about to get."""
        progress.add(num_samples, of)
        self._show(progress)
        if self._plan is not None:
            count_given()

    def _show(self, progress: Progress) -> None:
        """Makes ``state_dict`` describe the iteration that advanced last, unless another state was loaded."""
        if not self._is_resumed:
            self._progress = progress

    def _by_indices(self, sampler: OwnBatches, resumed: Progress | None) -> Iterator[Any]:
        """Yields this rank's rows of every batch, or whole batches if the loader cuts them itself."""
        progress, iteration = self._progress, sampler.begin(resumed)

        def before() -> None:
            if getattr(self._own, "persistent_workers", False) and sampler.iteration is not iteration:
                raise InputError(
                    "an iteration over the loader goes on after another one has begun, and both have one set "
                    "of workers",
                    expected="one iteration at a time, or workers that each iteration starts for itself",
                    got="persistent_workers=True",
                    hint="DataLoader(..., persistent_workers=False), or a second DataLoader",
                )
            iteration.receive_ahead()

        def count(batch: Any) -> Any:
            given = iteration.count()
            progress.numbers = iteration.numbers
            self._advance(progress, given.num_samples, given.digest)
            if not self._is_whole:
                count_dealt()
            if given.own_rows:
                return batch
            return pytree.tree_map_only(torch.Tensor, lambda x: x[:0], batch)

        def end() -> None:
            progress.end(iteration.last_numbers)
            self._show(progress)

        draws: list[RowDraws] = []  # the draws of this epoch, if its numbers are known

        def around() -> AbstractContextManager:
            if not self._draws_apart or iteration.numbers is None:
                return nullcontext()
            if not draws:
                draws.append(RowDraws.of(iteration.numbers, progress.epoch, dist.get_rank()))
            return draws[0].loading(progress.num_yielded)

        of_script = numbers_of_process()
        batches = iter(self._own)
        keep_queues(batches)
        if resumed is not None:  # the workers' seed was drawn when the epoch began
            set_numbers_of_process(of_script)
        return Counted(batches, count, end, before, around)

    def _whole(self, resumed: Progress | None) -> Iterator[Any]:
        """Yields every batch whole, from data without indices. To resume from a state, earlier batches are
        loaded and skipped."""
        progress = self._progress
        digests: deque[str] = deque(maxlen=1)
        if resumed is None:
            progress.numbers = Numbers.of(self._loader)
            batches: Iterable[Any] = self._own
        else:
            skipped = skip(lambda: iter(self._own), digest, resumed, self._loader)
            check_skipped(everyones(skipped.reason))
            batches = skipped.remaining

        def count(batch: Any) -> Any:
            self._advance(progress, num_rows(batch), digests[0])
            return batch

        def end() -> None:
            progress.end(Numbers.of(self._loader, with_process=False))
            self._show(progress)

        give = same_on_all if self._is_compared else digested
        return Counted(give(batches, digests.append), count, end)

    def __len__(self) -> int:
        return length(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader after the batch that it gave last. Not collective."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration give the batches that remained when ``state`` was saved. Every rank calls
        it; the first one's state counts. Raises InputError for anything else than a state; the next iteration
        raises it if the batches already given cannot be left out exactly."""
        self._progress, self._is_resumed = Progress.of_state(state), True
        if self._progress.sampler_epoch is not None:
            self._tell_epoch(self._progress.sampler_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the script's sampler. Raises InputError if a state in the middle of another epoch
        was loaded."""
        progress = self._progress
        goes_on = self._is_resumed or self._was_look()
        at = progress.epoch if progress.sampler_epoch is None else progress.sampler_epoch
        if goes_on and progress.num_yielded and epoch != at:
            raise InputError(
                "the loader should resume in the middle of another epoch",
                expected=f"set_epoch({at})",
                got=f"set_epoch({epoch})",
                hint="for epoch in range(state['epoch'], num_epochs): ..., with the state that was loaded",
            )
        if not goes_on:
            progress.start_at(epoch)
        if not progress.num_yielded:
            progress.epoch = epoch
        progress.sampler_epoch = epoch
        self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        for holder in (getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)):
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)


class FirstKept:
    """An iterator whose first batch was already taken: it gives that one and then the rest. After the first
    batch ``iter`` is passed on, so that a generator continues, and a class that starts over does so. Every
    other attribute is the iterator's."""

    def __init__(self, first: Any, batches: Iterator[Any]) -> None:
        self._kept, self._batches, self._has_given = [first], batches, False

    def __iter__(self) -> Iterator[Any]:
        if self._has_given:
            iter(self._batches)
        return self

    def __next__(self) -> Any:
        self._has_given = True
        return self._kept.pop() if self._kept else next(self._batches)

    def __len__(self) -> int:
        return length(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class OwnIterator(OwnLoader):
    """An ``OwnLoader`` for an iterator over batches: it is an iterator too, starts over if that one does, and
    has no state from which to resume."""

    def __init__(self, loader: Iterator, plan: Plan) -> None:
        own = Counted(loader, lambda batch: batch, lambda: None)  # does not pass ``iter`` on to the loader
        super().__init__(loader, own, plan, is_whole=True)
        self._batches, self._has_given = super().__iter__(), False

    def __iter__(self) -> Iterator[Any]:
        if self._has_given:
            iter(self._loader)
            self._batches = super().__iter__()
        return self

    def __next__(self) -> Any:
        self._has_given = True
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Raises InputError: an iterator has no state."""
        raise not_resumable()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises InputError: an iterator has no state."""
        self.state_dict()


def not_resumable() -> InputError:
    """The error for an iterator with which another start should resume."""
    return InputError(
        "an iterator of batches cannot be resumed in another start",
        expected="a loader that starts over in every epoch",
        got="an iterator, such as a generator",
        hint=(
            "a class with __iter__ that makes the generator, or a DataLoader",
            "or leave the loader out of what is saved",
        ),
    )


def num_rows(batch: Any) -> int:
    """The number of samples of a batch: dim 0 of its first tensor that has dims."""
    leaves = pytree.tree_leaves(batch)
    return next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), 0)
