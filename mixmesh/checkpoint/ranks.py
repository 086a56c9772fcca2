"""The ranks that save and load a checkpoint together; a failure of one is reported to all."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import InputError, MixmeshError
from ..runtime.comm import Comm
from ..runtime.first_rank import everyones, from_first_rank
from ..runtime.lost import Waiting
from ..training.preparation.saving import parallel_models
from .signals import Signals

# a rank that is alone needs no torch.distributed; a thread cannot filter warnings for itself
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
T = TypeVar("T")
PURPOSE = "checkpoint"
# errors that mean that the folder cannot be written to at all
WRONG_FOLDER = (
    errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip


class FilesFailure(Exception):
    """Files of a checkpoint could not be written or read, for instance because the disk is full. Raised with
    the same text on all ranks."""


def _hint_within(model: nn.Module) -> str:
    """The hint for a module that is not parallel itself, such as the averages of a parallel one."""
    within = parallel_models(model)
    if len(within) != 1:
        return "one folder of checkpoints for each parallel model"
    name = next(name for name, module in model.named_modules() if module is within[0])
    own = f"model=m.{name}, where m is the {type(model).__name__}"
    return f"{own}: in a folder of its own, with the other numbers of m in extra=..."


@dataclass(frozen=True)
class Ranks:
    """All ranks of a model; ``comm`` is None for a model of one device."""

    rank: int
    world_size: int
    comm: Comm | None

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """The ranks of a model. Raises InputError for a model that is not parallel among several ranks, or
        that holds parallel ones."""
        if (runtime := getattr(model, "_runtime", None)) is not None:
            comm = runtime.comm
            return cls(comm.rank, comm.world_size, comm)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if parallel_models(model) or world_size > 1:
            raise InputError(
                "a checkpoint is of one parallel model, or of a model on one device",
                expected="the model that mixmesh.prepare or parallelize returned",
                got=f"a {type(model).__name__} on {world_size} ranks",
                hint=_hint_within(model),
            )
        return cls(0, 1, None)

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @property
    def _joined(self) -> Comm:
        """The communicator of several ranks."""
        assert self.comm is not None
        return self.comm

    def group(self, purpose: str = PURPOSE) -> dist.ProcessGroup | None:
        """A separate process group, known to the watch; None for a single rank. The first call is
        collective."""
        if self.is_alone:
            return None
        comm = self._joined
        comm.add([(purpose, comm.everyone)], backend="gloo")
        return comm.groups[purpose, comm.everyone]

    def meeting(self, what: str) -> AbstractContextManager:
        """A context for a call in which all ranks meet. The watch knows of it: if a rank fails or is
        elsewhere, it tells all the others which one."""
        return nullcontext() if self.is_alone else self._joined.call(what)

    def set_step(self, num_steps: int) -> None:
        """Makes errors name the step; ``num_steps`` is the total number of steps made."""
        if self.comm is not None and self.comm.watch is not None:
            self.comm.watch.set_step(num_steps)

    def ends_when_told(self, signals: Signals) -> None:
        """Lets a signal end this process at once if a rank was lost. Signals otherwise wait for the end of a
        step, which then never comes."""
        if self.comm is not None and self.comm.watch is not None:
            self.comm.watch.is_told_to_stop = lambda: bool(signals.number)

    @property
    def unwatched(self) -> Ranks:
        """The same ranks for use in another thread than the watched one."""
        return self if self.is_alone else replace(self, comm=replace(self._joined, watch=None))

    @contextmanager
    def waiting(self) -> Iterator[dist.ProcessGroup | None]:
        """The group, while this rank waits for others in it. Raises CollectiveError if one is lost."""
        group = self.group()
        if group is None:
            yield None
            return
        comm, what = self._joined, "a checkpoint"
        watch = comm.watch
        if watch is not None:
            watch.waiting = Waiting.now(what)
        try:
            yield group
        except (RuntimeError, dist.DistError) as error:
            raise comm.channel(comm.everyone, what, PURPOSE).failed(error) from error
        finally:
            if watch is not None:
                watch.waiting = None

    def run(self, call: Callable[..., T]) -> T:
        """Calls a function of ``torch.distributed.checkpoint`` with the group. Raises FilesFailure if ranks
        could not write, and any other error of a rank, on all ranks."""
        try:
            with self.waiting() as group:
                return call(process_group=group, no_dist=self.is_alone)
        except CheckpointException as failure:  # not an Exception
            raise _error_of({rank: error for rank, (error, _) in failure.failures.items()}) from None

    def everyones(self, value: T) -> tuple[T, ...]:
        """The ``value`` of every rank. Collective."""
        with self.waiting() as group:
            return (value,) if group is None else everyones(value, group)

    def from_first(self, make: Callable[[], T]) -> T:
        """The first rank's ``make()``, or its error, on every rank. Collective."""
        with self.waiting() as group:
            return make() if group is None else from_first_rank(make, group)


def _error_of(errors: dict[int, BaseException]) -> BaseException:
    rank, first = min(errors.items())
    if all(isinstance(error, OSError) and error.errno not in WRONG_FOLDER for error in errors.values()):
        return FilesFailure("; ".join(f"rank {r}: {text_of(error)}" for r, error in sorted(errors.items())))
    wrong = next((e for e in errors.values() if isinstance(e, OSError) and e.errno in WRONG_FOLDER), None)
    if wrong is not None:
        return InputError(
            "checkpoints cannot be written there",
            expected="a folder that every rank may write to",
            got=text_of(wrong),
            where=str(wrong.filename or ""),
        )
    if isinstance(first, MixmeshError) or not isinstance(first, Exception):
        return first
    return MixmeshError(f"rank {rank} failed: {type(first).__name__}: {first}")


def text_of(error: BaseException) -> str:
    """Formats an error in one line."""
    told: Any = getattr(error, "strerror", None) or error
    return " ".join(str(told).split())[:200]
