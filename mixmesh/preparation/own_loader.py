"""This rank's part of a script's loader, counted, so that another start can go on with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from ..errors import InputError
from ..plan_file import Plan
from ..runtime.data import shard_batches
from ..runtime.first_rank import everyones, from_first_rank
from .alike import digest, same_on_all
from .resuming import (
    Numbers,
    Progress,
    check_skipped,
    numbers_of_process,
    set_numbers_of_process,
    skip,
)

BATCHES_PER_MESSAGE = 64  # one message with indices for many steps, and none that grows with the data set


@dataclass(frozen=True)
class Given:
    """One batch of indices that was given to be loaded: its rows, this rank's and all, and its digest."""

    own_rows: int
    num_samples: int
    digest: str


class OwnBatches:
    """A batch sampler: this rank's part of every batch of the first rank's ``batch_sampler``. Collective: all
    ranks iterate over it, as far as each other.

    ``rows`` gives the rank's first row in a batch of so many, and how many it has. Where it has none one
    index is given, as nothing can be loaded of none. ``given`` are the batches since the sampler was last
    asked for some, in order; ``numbers`` the first rank's random numbers that their order is drawn from, and
    ``last_numbers`` those at its end. Where ``resumed`` is set, the order of that state is gone on with."""

    def __init__(self, loader: DataLoader, rows: Callable[[int], tuple[int, int]]) -> None:
        self.loader, self.rows = loader, rows
        self.given: deque[Given] = deque()
        self.numbers: Numbers | None = None
        self.last_numbers: Numbers | None = None
        self.resumed: Progress | None = None

    def __len__(self) -> int:
        return len(self.loader.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        state, self.resumed = self.resumed, None
        self.given = deque()
        self.numbers = from_first_rank(lambda: state.numbers if state else Numbers.of(self.loader))
        opened: list[Iterator[list[int]]] = []  # of the first rank alone
        self.last_numbers = None
        while self.last_numbers is None:
            batches, self.last_numbers = from_first_rank(lambda: self.message(opened, state))
            for indices in batches:
                start, size = self.rows(len(indices))
                self.given.append(Given(size, len(indices), indices_text(indices)))
                yield indices[start : start + size] or indices[:1]

    def message(
        self, opened: list[Iterator[list[int]]], state: Progress | None
    ) -> tuple[list[list[int]], Numbers | None]:
        """The next batches of the first rank's sampler, and with the last of all the numbers after them."""
        if not opened:
            opened.append(self.order(state))
        batches = list(islice(opened[0], BATCHES_PER_MESSAGE))
        is_last = len(batches) < BATCHES_PER_MESSAGE
        return batches, Numbers.of(self.loader, with_process=False) if is_last else None

    def order(self, state: Progress | None) -> Iterator[list[int]]:
        """The batches of the sampler from the start, or from a state on."""
        sampler = self.loader.batch_sampler
        if state is None:
            return iter(sampler)
        skipped = skip(lambda: iter(sampler), indices_text, state, self.loader)
        check_skipped([skipped.reason])
        return skipped.remaining


class Counted:
    """An iterator over ``batches`` that tells of each, and of the end. No generator, whose frame would keep
    the batch."""

    def __init__(
        self, batches: Iterator[Any], on_batch: Callable[[Any], Any], on_end: Callable[[], object]
    ) -> None:
        self.batches, self.on_batch, self.on_end = batches, on_batch, on_end

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.on_batch(next(self.batches))
        except StopIteration:
            self.on_end()
            raise


class OwnLoader:
    """A script's loader, giving this rank's part of every batch. ``set_epoch`` goes to the script's sampler;
    every other attribute is that of the script's loader.

    ``state_dict`` says how far it has come, on every rank the same, and ``load_state_dict`` has the next
    iteration give the batches that remain, on any number of ranks."""

    def __init__(self, loader: Iterable, own: Iterable, plan: Plan, *, is_whole: bool) -> None:
        self._loader, self._own, self._plan, self._is_whole = loader, own, plan, is_whole
        sampler = getattr(own, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, OwnBatches) else None  # of data with indices
        self._progress, self._is_resumed = Progress(), False

    def __iter__(self) -> Iterator[Any]:
        resumed = from_first_rank(lambda: replace(self._progress) if self._is_resumed else None)
        self._is_resumed = False
        self._progress.begin(resumed)
        in_middle = resumed if resumed is not None and resumed.num_yielded else None
        if resumed is not None and in_middle is None and resumed.numbers is not None:
            resumed.numbers.restore(self._loader)
        batches = (
            self._whole(in_middle) if self._sampler is None else self._by_indices(self._sampler, in_middle)
        )
        return iter(shard_batches(batches, self._plan, dist.get_rank())) if self._is_whole else batches

    def _by_indices(self, sampler: OwnBatches, resumed: Progress | None) -> Iterator[Any]:
        """This rank's rows of every batch, or all where it cuts them itself."""
        progress = self._progress

        def count(batch: Any) -> Any:
            given = sampler.given.popleft()
            progress.numbers = sampler.numbers
            progress.add(given.num_samples, given.digest)
            if given.own_rows:
                return batch
            return pytree.tree_map_only(torch.Tensor, lambda x: x[:0], batch)

        sampler.resumed, of_script = resumed, numbers_of_process()
        batches = iter(self._own)
        if resumed is not None:  # its workers' seed was drawn when the epoch began
            set_numbers_of_process(of_script)
        return Counted(batches, count, lambda: progress.end(sampler.last_numbers))

    def _whole(self, resumed: Progress | None) -> Iterator[Any]:
        """Every batch whole, of data without indices. To go on with a state, the batches before are loaded
        and left out."""
        progress, digests = self._progress, deque(maxlen=1)
        if resumed is None:
            progress.numbers = Numbers.of(self._loader)
            batches: Iterable[Any] = self._own
        else:
            skipped = skip(lambda: iter(self._own), digest, resumed, self._loader)
            check_skipped(everyones(skipped.reason))
            batches = skipped.remaining

        def count(batch: Any) -> Any:
            progress.add(num_rows(batch), digests[0])
            return batch

        def end() -> None:
            progress.end(Numbers.of(self._loader, with_process=False))

        return Counted(same_on_all(batches, digests.append), count, end)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """How far the loader has come after the batch that it gave last. Not collective."""
        return self._progress.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has the next iteration give what remained when ``state`` was saved. Every rank calls it; the first
        one's state counts. Raises InputError for what is no such state; where the batches that were given
        cannot be left out exactly, the iteration does."""
        self._progress, self._is_resumed = Progress.of_state(state), True
        if self._progress.epoch_was_set:
            self._tell_epoch(self._progress.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Has the script's sampler draw the order of ``epoch``. Raises InputError where a state in the middle
        of another epoch was loaded."""
        progress = self._progress
        if self._is_resumed and progress.num_yielded and epoch != progress.epoch:
            raise InputError(
                "the loader was to go on in the middle of another epoch",
                expected=f"set_epoch({progress.epoch})",
                got=f"set_epoch({epoch})",
                hint="for epoch in range(state['epoch'], num_epochs): ..., with the state that was loaded",
            )
        if not self._is_resumed:
            progress.start_at(epoch)
        progress.epoch, progress.epoch_was_set = epoch, True
        self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        for holder in (getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)):
            if callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(epoch)


class OwnIterator(OwnLoader):
    """``OwnLoader`` of an iterator over batches: an iterator too, which cannot begin anew and has no
    state to go on from."""

    def __init__(self, loader: Iterator, plan: Plan) -> None:
        super().__init__(loader, loader, plan, is_whole=True)
        self._batches = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Raises InputError."""
        raise InputError(
            "an iterator of batches cannot be gone on with in another start",
            expected="a loader that begins anew in every epoch",
            got="an iterator, such as a generator",
            hint=(
                "a class with __iter__ that makes the generator, or a DataLoader",
                "or leave the loader out of what is saved",
            ),
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises InputError."""
        self.state_dict()


def indices_text(indices: Iterable[Any]) -> str:
    """All indices of a batch, also where they are in an array, whose own text may leave some out."""
    return repr([*indices])


def num_rows(batch: Any) -> int:
    """The samples of a batch: dim 0 of its first tensor that has dims."""
    leaves = pytree.tree_leaves(batch)
    return next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), 0)
