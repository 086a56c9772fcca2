"""The indices of this rank's part of every batch, in the order of the first rank's sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...runtime.data import Followed
from ...runtime.first_rank import from_first_rank
from ...runtime.watch import in_call
from .lengths import length
from .resuming import (
    Numbers,
    Progress,
    check_skipped,
    fingerprint,
    numbers_of_process,
    set_numbers_of_process,
    skip,
)

Rows = Callable[[int], tuple[int, int]]  # maps a batch's size to (a rank's first row, its number of rows)
DRAW_AT_START = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
BATCHES_PER_MESSAGE = 64  # one message has indices for many steps, but does not grow with the data set


@dataclass(frozen=True)
class Given:
    """A batch of indices that was handed to the workers: its rows, this rank's and all, and its digest."""

    own_rows: int
    num_samples: int
    digest: str


class Iteration:
    """One iteration over the batches of the first rank's ``batch_sampler``; continues from ``state`` if there
    is one.

    ``ahead`` is the largest number of batches that the workers of any rank load in advance. All ranks receive
    indices when their scripts ask for the same batch, far enough ahead that no worker needs more until the
    next time: if each rank received them when its own workers ran out, ranks would do so during different
    steps of the script.

    ``numbers`` are the first rank's random numbers from which the order is drawn, and ``last_numbers`` those
    at its end; None until known.
    """

    def __init__(
        self,
        loader: DataLoader,
        rows: Followed[Rows],
        ahead: int,
        state: Progress | None,
    ) -> None:
        self.loader, self.rows, self.ahead, self.state = loader, rows, ahead, state
        self.received: deque[list[int]] = deque()  # received, but not yet handed to the workers
        self.given: deque[Given] = deque()  # handed to the workers, but not yet counted
        self.num_received = self.num_counted = 0
        self.numbers: Numbers | None = None
        self.last_numbers: Numbers | None = None
        self.order: Iterator[list[int]] | None = None  # the first rank has one

    def receive_ahead(self) -> None:
        """Receives all batches that any rank needs until the next batch is counted. Collective."""
        if self.numbers is None:
            state = self.state
            self.numbers = from_first_rank(lambda: state.numbers if state else Numbers.of(self.loader))
        while self.last_numbers is None and self.num_received <= self.num_counted + self.ahead:
            with in_call("the order of the data"):
                batches, self.last_numbers, drawn = from_first_rank(self.message)
            if drawn is not None:
                set_numbers_of_process(drawn)
            self.received.extend(batches)
            self.num_received += len(batches)

    def own_indices(self) -> Iterator[list[int]]:
        """Yields this rank's indices in every batch. If it has none, yields one index, because nothing can be
        loaded from an empty list."""
        if self.numbers is None:  # workers ask before the first batch is needed
            self.receive_ahead()
        while self.received:
            indices = self.received.popleft()
            start, size = self.rows.use()(len(indices))
            self.given.append(Given(size, len(indices), indices_text(indices)))
            yield indices[start : start + size] or indices[:1]

    def count(self) -> Given:
        """Counts the batch that was loaded next, and returns its description."""
        self.num_counted += 1
        return self.given.popleft()

    def message(self) -> tuple[list[list[int]], Numbers | None, dict[str, Any] | None]:
        """The next batches of the first rank's sampler, and with the last of all the numbers after them. If
        the sampler has drawn from the process's random numbers, these are included too: all ranks continue
        from there, so that numbers drawn by the loop are the same on all."""
        before = numbers_of_process()
        if self.order is None:
            self.order = self.begin_order()
        num_drawn = self.num_next()
        batches = list(islice(self.order, num_drawn))
        is_last = len(batches) < num_drawn
        after = numbers_of_process()
        drawn = after if fingerprint(before) != fingerprint(after) else None
        return batches, Numbers.of(self.loader, with_process=False) if is_last else None, drawn

    def num_next(self) -> int:
        """The number of batches to draw for the next message: only as many as one device would have drawn by
        now, unless the sampler draws no random numbers for them. PyTorch's random sampler draws once more at
        its end, so it is asked for more than it has only when the loop is."""
        sampler = sampler_of(self.loader)
        if not draws_at_start(sampler):
            return 1
        num_skipped = 0 if self.state is None else self.state.num_yielded
        num_left = length(sampler) - num_skipped - self.num_received
        return min(num_left, BATCHES_PER_MESSAGE) if num_left > 0 else 1

    def begin_order(self) -> Iterator[list[int]]:
        """The batches of the sampler, from the start or from the state on."""
        sampler = sampler_of(self.loader)
        if self.state is None:
            return iter(sampler)
        skipped = skip(lambda: iter(sampler), indices_text, self.state, self.loader)
        check_skipped([skipped.reason])
        return skipped.remaining


def sampler_of(loader: DataLoader) -> Iterable[list[int]]:
    """The sampler of a loader's batches, which every loader with indices has."""
    sampler = loader.batch_sampler
    assert sampler is not None
    return sampler


def draws_at_start(batch_sampler: Iterable[list[int]]) -> bool:
    """Whether the order of a loader is known to be drawn with its first batch. Samplers of a script may draw
    batch by batch, and the numbers that the loop draws in between, or in the next epoch, follow from that."""
    if type(batch_sampler) is not BatchSampler:
        return False
    sampler = batch_sampler.sampler
    if type(sampler) is RandomSampler:  # which draws for one pass over the data at a time
        return not sampler.replacement and sampler.num_samples <= length(sampler.data_source)
    return type(sampler) in DRAW_AT_START


class OwnBatches:
    """A batch sampler for this rank's part of every batch of the first rank's ``batch_sampler``. ``rows``
    gives the position of this rank's first row in a batch of some size, and their number. ``ahead`` is that
    of ``Iteration``, the same on all ranks. ``iteration`` is the one that began last; it is used next."""

    def __init__(self, loader: DataLoader, rows: Rows, ahead: int = 0) -> None:
        self.loader, self.rows, self.ahead = loader, Followed(rows), ahead
        self.iteration: Iteration | None = None

    def settle(self) -> None:
        """Cuts everything from now on by the rows that were to be used next."""
        self.rows.settle()

    def begin(self, state: Progress | None) -> Iteration:
        """Starts an iteration for the next ``iter``."""
        self.iteration = Iteration(self.loader, self.rows, self.ahead, state)
        return self.iteration

    def follow(self, rows: Rows) -> None:
        """Makes ``rows`` cut the batches after the next ``ahead`` ones. Earlier batches are already being
        loaded, on this rank or another."""
        num_loading = 0 if self.iteration is None else len(self.iteration.given)
        self.rows.follow(rows, self.ahead - num_loading)

    def __len__(self) -> int:
        return length(sampler_of(self.loader))

    def __iter__(self) -> Iterator[list[int]]:
        return (self.iteration or self.begin(None)).own_indices()


def indices_text(indices: Iterable[Any]) -> str:
    """All indices of a batch, even from an array, whose own text may leave some out."""
    return repr([*indices])
