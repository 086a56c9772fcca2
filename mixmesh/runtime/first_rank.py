"""Exchanges values between ranks, and waits until all ranks are there. To the watch each exchange is a
separate call, or a part of the call under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CollectiveError, MixmeshError
from .failures import collective_error
from .lost import Waiting
from .messages import meet, message_group
from .watch import Watch, running_watch

T = TypeVar("T")
FROM_FIRST, OF_ALL = "a message of the first rank", "messages of all ranks"


def from_first_rank(
    make: Callable[[], T], group: dist.ProcessGroup | None = None, *, what: str = FROM_FIRST
) -> T:
    """Runs ``make`` on the first rank and returns its value on every rank. Collective over ``group``, which
    must contain all ranks; an error on the first rank is raised everywhere. Without process groups this rank
    counts as the first. ``what`` names the exchange in messages."""
    if not dist.is_initialized():
        return make()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    with _exchange(what) as waiting:
        if dist.get_rank() == 0:
            try:
                box[0] = make()
            except MixmeshError as error:
                box[1] = failure = error
            except Exception as error:
                # its class may be unknown to pickle, or to the other ranks
                failure, box[1] = error, MixmeshError(f"rank 0 failed: {type(error).__name__}: {error}")
        with waiting():
            dist.broadcast_object_list(box, src=0, group=group or message_group())
    if box[1] is not None:
        raise failure or box[1]
    return box[0]


def everyones(value: T, group: dist.ProcessGroup | None = None) -> tuple[T, ...]:
    """The ``value`` of every rank, in rank order. Collective over ``group``, which has all ranks. Without
    process groups this one is the only rank."""
    if not dist.is_initialized():
        return (value,)
    values: list[Any] = [None] * dist.get_world_size()
    with _exchange(OF_ALL) as waiting, waiting():
        dist.all_gather_object(values, value, group=group or message_group())
    return tuple(values)


def wait_for_all(what: str) -> None:
    """Waits until all ranks have arrived here; without process groups returns immediately. Collective."""
    if dist.is_initialized():
        with _exchange(what) as waiting, waiting():
            meet()


def largest(x: torch.Tensor, what: str) -> torch.Tensor:
    """The largest of every rank's values, element by element, on the device of ``x``. Collective. Without
    process groups this one is the only rank."""
    if not dist.is_initialized():
        return x
    of_all = x.to("cpu", copy=True)
    with _exchange(what) as waiting, waiting():
        dist.all_reduce(of_all, dist.ReduceOp.MAX, group=message_group())
    return of_all.to(x.device)


@contextmanager
def _exchange(what: str) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A context for a call in which ranks exchange something. It yields a function that returns a context for
    waiting: this raises CollectiveError if a rank is lost meanwhile and the watch knows which."""
    watch = running_watch()
    if watch is None or not watch.is_of_this_thread:
        yield partial(_named, what)
        return
    with watch.call(what):
        yield partial(_watched, watch, what)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """A context for an exchange that no watch follows."""
    try:
        yield
    except RuntimeError as error:
        raise _error_of(what, error) from error


def _error_of(what: str, error: RuntimeError) -> CollectiveError:
    ranks = f"0 to {dist.get_world_size() - 1}"
    return collective_error(dist.get_rank(), what, error, ranks=ranks)


@contextmanager
def _watched(watch: Watch, what: str) -> Iterator[None]:
    if watch.waiting is not None:  # a rank that waits looks at its errors
        yield
        return
    watch.waiting = Waiting.now(what)
    try:
        yield
    except RuntimeError as error:
        if (cause := watch.explain()) is not None:
            raise cause from error
        raise _error_of(what, error) from error
    finally:
        watch.waiting = None
