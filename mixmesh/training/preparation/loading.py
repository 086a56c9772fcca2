"""Each rank's own rows of every batch of a script's DataLoader, in the order of the first rank's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from ...base.callers import line_of_script, warn
from ...base.units import ranks_text
from ...errors import InputError
from ...frontend.trace.own_generators import generators_in, marks_of, set_states, states_of
from ...lang.plan_file import Plan
from ...runtime.agreement import by_value
from ...runtime.data import own_rows, own_samples
from ...runtime.first_rank import everyones, from_first_rank
from .alike import digest
from .lengths import length
from .own_batches import OwnBatches, sampler_of
from .own_loader import FirstKept, OwnIterator, OwnLoader, not_resumable
from .refusals import check_workers
from .resuming import fingerprint, numbers_of_process, set_numbers_of_process
from .untouched import untouched

PROBED_ROWS = 8  # number of rows among which lengths will differ, if they differ at all
SAME_SUM = 1e-3  # relative: machines of several kinds may decode or resize a sample differently
KEPT_OPTIONS = "collate_fn", "pin_memory", "worker_init_fn", "generator"
OTHERWISE_AGAIN = (
    "the same samples, loaded twice with the same random numbers, came out otherwise: what changes them is "
    "not found, so a rank changes its own rows otherwise than one device. If it is a generator, make it an "
    "attribute of the data set or of an object that is the collate_fn, or draw torch's own random numbers"
)
HINTS_OF_DATA = (
    "give every rank the whole data set, not Subset(data, range(rank, n, world_size)): prepare deals it out",
    "the same files in the same order on all machines; data made at random seeded alike on all ranks",
)
OPTIONS_OF_WORKERS = (
    "num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context",
)  # fmt: skip


def from_first_batch(loader: Iterable) -> tuple[Any, Iterable]:
    """A typical batch of a loader, and a loader of all its batches. An iterator has already given away its
    first one, and may have drawn random numbers for it, which must not be drawn again."""
    if not is_iterator(loader):
        return example_batch(loader), loader
    batch = next(loader, None)
    _check_first(batch)
    return batch, FirstKept(batch, loader)


def is_iterator(loader: Iterable) -> TypeGuard[Iterator]:
    """Whether a loader is read by ``next``, like generators and classes that start over with ``iter``. This
    calls its ``iter``, as a loop would."""
    return hasattr(type(loader), "__next__") and iter(loader) is loader


def example_batch(loader: Iterable) -> Any:
    """A typical batch of a loader. Afterwards the random numbers, also of the script's own generators, and
    the loader's own state for choosing samples are as before. Raises InputError for one that would then not
    start over."""
    if not has_indices(loader):
        return _first_of_stream(loader)
    with same_random_numbers(generators_in(loader)):
        if loader.batch_size is not None:
            # does not use the sampler, whose own generator would advance
            indices = list(range(min(loader.batch_size, length(loader.dataset))))
        else:
            indices = next(iter(untouched(sampler_of(loader))), [])
        batch = load(loader, indices) if indices else None
    _check_first(batch)
    return batch


def _first_of_stream(loader: Iterable) -> Any:
    """The first batch of a loader without indices. It is read twice, as reading it may have used it up."""

    def read() -> Any:
        with same_random_numbers(generators_in(loader)):
            return next(iter(untouched(loader)), None)

    batch = read()
    _check_first(batch)
    if getattr(loader, "num_workers", 0):  # these read copies
        return batch
    again = read()
    if again is None or digest(again) != digest(batch):
        raise InputError(
            "the data do not start over, so the batch by which the step is planned would not train",
            expected="the same first batch each time that the loop over the loader begins",
            got="another batch" if again is not None else "no batch the second time",
            where=line_of_script(),
            hint=(
                "make readers and iterators in __iter__ of the data set, not in its __init__",
                "seed what it draws from in __iter__, or draw torch's own random numbers",
                "for a loop of your own: mixmesh.prepare(model, optimizer, iter(loader))",
            ),
        )
    return batch


def _check_first(batch: Any) -> None:
    if batch is None:
        raise InputError("the loader has no batch", expected="at least one batch", got="nothing")


def as_arguments(batch: Any) -> Any:
    """A batch in the form of a model's arguments: a dict by name, or a tuple; a tensor becomes a tuple of
    one."""
    if isinstance(batch, list):
        return tuple(batch)
    return (batch,) if isinstance(batch, torch.Tensor) else batch


@contextmanager
def same_random_numbers(generators: Sequence[Any] = ()) -> Iterator[None]:
    """A context after which the random numbers of the process, and of the script's own ``generators``, are as
    before."""
    of_script, states = numbers_of_process(), states_of(generators)
    try:
        yield
    finally:
        set_numbers_of_process(of_script)
        set_states(generators, states)


def take_random_numbers(generators: Sequence[Any] = ()) -> None:
    """Continues the first rank's random numbers on every rank, those of the process and of ``generators``, so
    that everything that a script draws from now on is the same on all. Collective."""
    of_process, states = from_first_rank(
        lambda: (numbers_of_process(), states_of(generators)), what="random numbers"
    )
    set_numbers_of_process(of_process)
    set_states(generators, states)


def has_indices(loader: Iterable) -> TypeGuard[DataLoader]:
    """Whether batches are lists of indices into a data set, so that a rank can load only its own."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def load(loader: DataLoader, indices: list[int]) -> Any:
    """The samples of ``indices`` as one batch, loaded by this process."""
    return loader.collate_fn(samples_of(loader, indices))


def samples_of(loader: DataLoader, indices: list[int]) -> Any:
    """The samples of ``indices``, as PyTorch loads them."""
    dataset = loader.dataset
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many is not None else [dataset[i] for i in indices]


def depends_on_others(loader: DataLoader) -> bool:
    """Whether the rows of a batch depend on the rest of it: they are padded to its longest row, or mixed with
    each other. To find out, some samples from all over the data set are loaded together, in part and one by
    one, with the same random numbers. Rows that cannot be loaded in parts count as dependent, and so do those
    for which random numbers are drawn as ``draws`` describes: these equal one device's numbers only if the
    whole batch is loaded."""
    try:
        generators = generators_in(loader)
        if draws(loader, generators):
            return True
        size = length(loader.dataset)
        count = min(loader.batch_size or PROBED_ROWS, PROBED_ROWS, size)
        indices = [n * size // count for n in range(count)]
        load = partial(load_again, loader, generators=generators)
        whole, half = load(indices), load(indices[: count // 2 or 1])
        if digest(whole) != digest(load(indices)):
            warn(OTHERWISE_AGAIN)
            return True
        if any(not torch.equal(x[: len(y)], y) for x, y in zip(whole, half, strict=True)):
            return True
        alone = [load([i]) for i in indices]
        return any(x.shape[1:] != y.shape[1:] for row in alone for x, y in zip(whole, row, strict=True))
    except Exception:  # a collate function may fail in any way on a batch such as it has never seen
        return True


def draws(loader: DataLoader, generators: Sequence[Any]) -> bool:
    """Whether the collate function draws random numbers of the process, or anything in a batch draws from the
    script's own ``generators``. All of these are restored."""
    with same_random_numbers(generators):
        count = min(loader.batch_size or PROBED_ROWS, PROBED_ROWS, length(loader.dataset))
        own = marks_of(generators)
        samples = samples_of(loader, list(range(count)))
        before = fingerprint(numbers_of_process())
        loader.collate_fn(samples)
        return fingerprint(numbers_of_process()) != before or marks_of(generators) != own


def load_again(loader: DataLoader, indices: list[int], generators: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors with rows in a batch of these samples. Random numbers, also those of ``generators``, are
    restored."""
    with same_random_numbers(generators):
        leaves = pytree.tree_leaves(load(loader, indices))
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.ndim]


Sums = tuple[tuple[int, ...], float, float, float]  # shape, sum, weighted sum, and sum of absolute values


def check_same_data(loader: DataLoader) -> None:
    """Raises InputError, on all ranks, if their data sets have other lengths, or another first or last
    sample: the first rank's indices would then mean other samples on the others. Collective."""
    generators = generators_in(loader)
    with same_random_numbers(generators):
        take_random_numbers(generators)
        looks = everyones(look_at(loader, generators))
    sizes = by_value({rank: f"{size} samples" for rank, (size, _) in enumerate(looks) if size is not None})
    if len(sizes) > 1:
        got = "; ".join(f"{size} on {ranks_text(ranks)}" for size, ranks in sizes.items())
        raise _other_data("the ranks have data sets of other lengths", got)
    sums = {rank: own for rank, (_, own) in enumerate(looks) if own is not None}
    first = min(sums, default=0)
    if others := [rank for rank, own in sums.items() if not _are_close(own, sums[first])]:
        got = f"another first or last sample on {ranks_text(others)} than on rank {first}"
        raise _other_data("the ranks have other data", got)


def _other_data(message: str, got: str) -> InputError:
    return InputError(message, expected="the same data set on every rank", got=got, hint=HINTS_OF_DATA)


def look_at(loader: DataLoader, generators: Sequence[Any]) -> tuple[int | None, list[Sums] | None]:
    """The length of the data set, and sums over its first and its last sample. None if unknown: for a data
    set without a length, and for samples that come out otherwise each time or cannot be loaded alone."""
    size = None
    try:
        size = length(loader.dataset)
        first, again = (
            [sums_of(x) for n in (0, size - 1) for x in load_again(loader, [n], generators)] for _ in range(2)
        )
    except Exception:  # a data set may fail in any way; the training will show it
        return size, None
    return size, first if first == again else None


def sums_of(x: torch.Tensor) -> Sums:
    """Numbers that depend on all values of a tensor and on their order."""
    values = x.detach().cpu().double().flatten().nan_to_num(0.0, 0.0, 0.0)
    weighted = values * torch.linspace(0, 1, len(values), dtype=torch.float64)
    return tuple(x.shape), values.sum().item(), weighted.sum().item(), values.abs().sum().item()


def _are_close(some: list[Sums], others: list[Sums]) -> bool:
    """Whether sums are equal, but for rounding."""
    if [shape for shape, *_ in some] != [shape for shape, *_ in others]:
        return False
    return all(
        abs(a - b) <= SAME_SUM * max(x[3], y[3]) for x, y in zip(some, others) for a, b in zip(x[1:3], y[1:3])
    )


def whole_batch(num_samples: int) -> tuple[int, int]:
    """All rows of a batch."""
    return 0, num_samples


def own_loader(loader: Iterable, plan: Plan, *, is_compared: bool = True) -> OwnLoader:
    """A loader of this rank's rows. If all inputs of the program are cut alike by samples, and no row of a
    batch depends on the others, the rank loads only its own rows; else it loads whole batches and cuts them.
    A loader without indices (an iterable data set) must give the same batches on every rank, which is checked
    at every batch, unless the caller does it (``is_compared=False``). Raises InputError if the ranks have
    other data. Collective."""
    program, rank = plan.program, dist.get_rank()
    check_workers(loader)
    if is_iterator(loader):
        return OwnIterator(loader, plan)
    if not has_indices(loader):
        check_same_workers(loader)
        return OwnLoader(loader, loader, plan, is_whole=True, is_compared=is_compared)
    check_same_data(loader)
    own = own_samples(program, rank) if plan.order is None else None
    _, size, _ = own or (0, 0, 0)
    depends = from_first_rank(lambda: depends_on_others(loader))
    # also for a rank without samples, whose empty tensors are cut from a whole batch
    is_whole = not size or depends
    rows = whole_batch if is_whole else partial(own_rows, program, rank)
    draws_apart = own is not None and not depends
    return OwnLoader(loader, loader_of_rows(loader, rows), plan, is_whole=is_whole, draws_apart=draws_apart)


def resumable(loader: Iterable) -> Iterable:
    """A loader with the batches of ``loader`` that also has ``state_dict`` and ``load_state_dict``: for a
    loop on one device, or one in which every rank has whole batches. A loader that already has these, as
    ``mixmesh.prepare`` returns under torchrun, is returned unchanged. Collective with several ranks.

    Every epoch has the batches that ``loader`` itself would give; an epoch that is resumed has the remaining
    ones. Raises InputError for an iterator, which cannot start over.
    """
    if hasattr(loader, "state_dict"):
        return loader
    if is_iterator(loader):
        raise not_resumable()
    if not has_indices(loader):
        check_same_workers(loader)
        return OwnLoader(loader, loader, None, is_whole=False)
    return OwnLoader(loader, loader_of_rows(loader, whole_batch), None, is_whole=False)


def loader_of_rows(loader: DataLoader, rows: Callable[[int], tuple[int, int]]) -> DataLoader:
    """A loader like ``loader`` for these ``rows`` of every batch of the first rank. Collective."""
    batches = OwnBatches(loader, rows)
    options = {name: getattr(loader, name) for name in KEPT_OPTIONS} | workers_like(loader)
    own = DataLoader(loader.dataset, batch_sampler=batches, **options)
    batches.ahead = max(everyones(own.num_workers * (own.prefetch_factor or 0)))
    return own


def check_same_workers(loader: Iterable) -> None:
    """Raises InputError if the numbers of workers for a data set without indices differ between ranks: they
    decide the order of its samples and their random numbers. Collective."""
    counts = everyones(loader.num_workers if isinstance(loader, DataLoader) else 0)
    if len(set(counts)) > 1:
        raise InputError(
            "the ranks have other numbers of workers, which decide the order of an iterable data set",
            expected=f"num_workers={counts[0]} on every rank, as on the first one",
            got=", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts)),
            hint=(
                f"DataLoader(..., num_workers={counts[0]}), not a number that follows from os.cpu_count()",
                "or a data set with __getitem__, for which every rank may have its own number",
            ),
        )


def workers_like(loader: DataLoader) -> dict[str, Any]:
    """The options of a loader's workers. A rank has as many workers as its own loader, but at least one if
    the first rank has some, and none if that has none: with workers the order of an epoch is drawn at another
    time, and persistent workers change what a second iteration does. Collective."""
    options = {name: getattr(loader, name) for name in OPTIONS_OF_WORKERS}
    has_workers, stays = from_first_rank(lambda: (loader.num_workers > 0, loader.persistent_workers))
    if not has_workers:
        return {}
    return options | {"num_workers": max(loader.num_workers, 1), "persistent_workers": stays}
