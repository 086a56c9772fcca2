"""The batches of a job for one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..lang.ir import Program
from ..lang.plan_file import Plan
from .agreement import COMPARED_STEPS
from .data import Feed, Followed, shard_batches_by
from .parallel_model import ParallelModel
from .verdicts import END_OF_DATA


def endless(
    batches: Iterable | None,
    batch: Any,
    epochs: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> Iterator[Any]:
    """Repeats ``batches``, or ``batch`` if there are none, forever or for ``epochs`` epochs. ``on_end`` is
    called as for ``Passes``."""
    times = () if epochs is None else (epochs,)
    if batches is None:
        return itertools.repeat(batch, *times)
    if iter(batches) is batches:
        return iter(batches)  # an iterator runs once
    return Passes(itertools.repeat(batches, *times), on_end)


class Passes(Iterator[Any]):
    """The batches of consecutive passes over data. Two passes in a row without a batch are the end: one may
    be the rest of an epoch that was read before, but data that has no more would be asked forever. ``on_end``
    is called at the end of passes 1, 2, 4, 8, …. It is a class, because a generator's frame would keep each
    batch alive."""

    def __init__(self, passes: Iterable[Iterable], on_end: Callable[[], object] = lambda: None) -> None:
        self._passes, self._on_end, self._num_begun = iter(passes), on_end, 0
        self._current: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        for batch in self._current:
            return batch
        if self._num_begun.bit_count() == 1:
            self._on_end()
        self._num_begun += 1
        for _ in range(2):
            self._current = iter(next(self._passes))
            for batch in self._current:
                return batch
        raise StopIteration


class ComparesFirst:
    """Compares the first whole batches of all ranks, because ranks whose data is in another order would train
    on other samples, and lets them meet where a pass ends. Collective."""

    def __init__(self, model: ParallelModel) -> None:
        self._model, self._num_left = model, COMPARED_STEPS

    def __call__(self, batch: Any) -> Any:
        if self._num_left and isinstance(batch, Mapping | tuple | list):
            self._num_left -= 1
            self._model.compare(batch)
        return batch

    def meet(self) -> None:
        """Waits for all ranks at the end of the data. If it ends earlier on one than on others, their watch
        ends all of them."""
        comm = self._model.comm
        with comm.call(END_OF_DATA):
            comm.compare(dict)


def own_batches(
    job: Any,
    plan: Plan | Program,
    rank: int,
    epochs: int | None = None,
    look: Callable[[Any], Any] = lambda batch: batch,
    *,
    on_end: Callable[[], object] = lambda: None,
    may_follow: bool = False,
) -> Feed:
    """This rank's share of the job's batches; none is a view that would keep the whole batch alive. ``look``
    gets each batch before it is cut, and returns it; ``on_end`` is called as for ``Passes``. A job without
    data has one batch, which is cut once: another plan may follow only if ``may_follow`` is set, because then
    each rank keeps the whole batch."""
    followed = Followed(plan)
    share = partial(shard_batches_by, followed, rank=rank, model=job.model)
    if job.data is not None:
        return Feed(map(owned, share(map(look, endless(job.data, None, epochs, on_end)))), followed.follow)
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
