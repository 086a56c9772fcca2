"""Values that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import MixmeshError

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
    dist.all_gather_object(values, value, group=group)
    return tuple(values)
