"""Loaders that ``prepare`` refuses immediately, because some of their data would be left out or could not be
trained on."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from multiprocessing.util import get_temp_dir
from string import ascii_lowercase as ALPHABET
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from ...errors import InputError
from ...frontend.job import batch_size
from ...lang.ir import samples_of
from ...lang.ir.placement import shard_sizes
from ...lang.plan_file import Plan
from .lengths import length

LONGEST_SOCKET_BYTES = 107  # the longest name of a socket on Linux


def check_unwrapped(model: nn.Module) -> None:
    """Raises InputError for a model inside a wrapper that would divide its batches again."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(
            f"{type(model).__name__} is around the model that is to be prepared",
            expected="the model itself: mixmesh deals samples out to ranks",
            got=f"{type(model).__name__}({type(model.module).__name__})",
            hint="leave the wrapper out, or mixmesh.prepare(model.module, ...)",
        )


def check_gives_all(loader: Iterable) -> None:
    """Raises InputError for a loader whose sampler deals samples out to ranks: each rank would get a part of
    the first rank's part, and no rank would get the rest."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        num_ranks = getattr(holder, "num_replicas", None)
        if isinstance(num_ranks, int) and num_ranks > 1:
            raise InputError(
                "the loader gives a rank a part of the samples, which prepare would deal out again",
                expected="a loader of global batches, the same on every rank, as on one device",
                got=f"{type(holder).__name__} for {num_ranks} ranks",
                hint=(
                    "DataLoader(data, batch_size=B, shuffle=True), B of all ranks together, without it",
                    f"or {type(holder).__name__}(..., num_replicas=1, rank=0), to keep its set_epoch",
                ),
            )


def check_workers(loader: Iterable) -> None:
    """Raises InputError if the workers of a loader cannot send batches to this process: tensors go through a
    socket in the folder for temporary files. Python's error appears in the worker alone, and the loop would
    wait for its batch without end."""
    if not getattr(loader, "num_workers", 0) or sys.platform == "win32":
        return
    longest = len(os.fsencode(os.path.join(get_temp_dir(), "listener-12345678")))
    if longest > LONGEST_SOCKET_BYTES:
        raise InputError(
            "the folder for temporary files has too long a name: the loader's workers cannot send batches",
            expected=f"a socket of at most {LONGEST_SOCKET_BYTES} bytes, of which 32 are its own name",
            got=f"{longest} bytes",
            where=f"TMPDIR={tempfile.gettempdir()}",
            hint=("export TMPDIR=/tmp", "or num_workers=0"),
        )


def check_takes(inputs: Callable[..., Any], values: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raises InputError if the function ``inputs`` cannot be called with the values of a batch."""
    try:
        taken = signature(inputs)
    except (TypeError, ValueError):  # a function that Python knows nothing about
        return
    try:
        taken.bind(*values, **named)
    except TypeError as error:
        names = ", ".join(map(str, named or ALPHABET[: len(values)]))
        raise InputError(
            "the function inputs= does not take the values of a batch",
            expected=f"inputs({names}): {'values by their keys' if named else 'one argument for each value'}",
            got=f"inputs{taken}: {error}",
            hint=f"mixmesh.prepare(..., inputs=lambda {names}: (...)), or inputs=lambda "
            f"{'**batch' if named else '*batch'}: (...)",
        ) from None


@dataclass(frozen=True)
class OneBatch:
    """The ``batch`` that a trainer plans by, in place of a loader; ``check`` raises InputError for a plan
    that does not fit the other batches of its training."""

    batch: Any
    check: Callable[[Plan], object] = lambda plan: None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.batch,))


LESS = (
    "DataLoader(..., drop_last=True)",
    'mixmesh.prepare(..., planner="ddp-tuned"), which takes batches of any size',
)


def check_last_batch(
    loader: Any, plan: Plan, *, num_batches: int | None = None, hint: tuple[str, ...] = LESS
) -> None:
    """Raises InputError if a plan is a pipeline whose micro-batches cannot be cut from a loader's smaller
    last batch, which would otherwise be refused at the end of an epoch. Training ends after ``num_batches``
    of an epoch; None stands for all of them."""
    if plan.order is None or not plan.micro_batches:
        return
    num_full, left = _smaller_last(loader)
    if not left or (num_batches is not None and num_batches <= num_full):
        return
    steps = max(row.steps for row in plan.micro_batches)
    samples = samples_of(plan.program)
    shares = [[samples.counts[rank] / samples.batch_size for rank in ranks] for ranks in samples.stages]
    sizes = [size for stage in shares for size in shard_sizes(left, tuple(stage))]
    if any(size % steps or not size for size in sizes):
        raise InputError(
            f"the plan is a pipeline of {steps} micro-batches, which the last batch cannot be cut into",
            expected=f"a multiple of {steps} samples for every device of a stage in every batch",
            got=f"{left} samples in the last one, {', '.join(map(str, sizes))} for the devices",
            hint=hint,
        )


def _smaller_last(loader: Any) -> tuple[int, int]:
    """The number of batches before the smaller last one of a loader, or of a list of batches, and the samples
    of that one; 0 and 0 if there is none, or if that is not known."""
    if isinstance(loader, list | tuple) and loader:
        first, last = (_num_samples(loader[i]) for i in (0, -1))
        return (len(loader) - 1, last) if last < first else (0, 0)
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batches) is not BatchSampler or batches.drop_last:
        return 0, 0
    try:
        return divmod(length(batches.sampler), batches.batch_size)
    except TypeError:  # the length is unknown
        return 0, 0


def _num_samples(batch: Any) -> int:
    return batch_size(batch if isinstance(batch, Mapping) else (batch,)) or 0
