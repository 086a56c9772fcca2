"""Values that ranks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import MixmeshError
from .lost import Waiting
from .watch import running_watch

T = TypeVar("T")


def from_first_rank(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Runs ``make`` on the first rank and returns its value on every rank. Collective over ``group``, which
    has all ranks; an error there is raised everywhere. Without process groups this one is the first rank."""
    if not dist.is_initialized():
        return make()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except MixmeshError as error:
            box[1] = failure = error
        except Exception as error:
            # the class may be unknown to pickle, or to the other ranks
            failure, box[1] = error, MixmeshError(f"rank 0 failed: {type(error).__name__}: {error}")
    with _watched("a message of the first rank"):
        dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise failure or box[1]
    return box[0]


def everyones(value: T, group: dist.ProcessGroup | None = None) -> tuple[T, ...]:
    """The ``value`` of every rank, in rank order. Collective over ``group``, which has all ranks. Without
    process groups this one is the only rank."""
    if not dist.is_initialized():
        return (value,)
    values: list[Any] = [None] * dist.get_world_size()
    with _watched("messages of all ranks"):
        dist.all_gather_object(values, value, group=group)
    return tuple(values)


@contextmanager
def _watched(what: str) -> Iterator[None]:
    """Raises CollectiveError if a rank is lost meanwhile and the watch knows which."""
    watch = running_watch()
    if watch is None or watch.waiting is not None:  # a rank that waits looks at its errors
        yield
        return
    watch.waiting = Waiting(what, time.monotonic(), is_call=bool(watch.doing))
    try:
        yield
    except RuntimeError as error:
        if (cause := watch.explain()) is not None:
            raise cause from error
        raise
    finally:
        watch.waiting = None
