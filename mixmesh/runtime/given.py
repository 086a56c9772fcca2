"""Counts the batches that the loaders of ``mixmesh.prepare`` have given to a loop, so that in every call the
ranks can tell whether their rows belong to the same one; and the batches of which such a loader, or
``shard_batches``, gave only a rank's own rows. A thread that loads ahead counts for itself."""

from __future__ import annotations

import threading


class _Given(threading.local):
    num_batches = 0
    num_dealt = 0


_given = _Given()


def begin_epoch() -> None:
    """Starts over with no batches. Every rank calls it when a loader is iterated over anew."""
    _given.num_batches = 0


def count_given() -> None:
    """Notes that this thread was given one more batch."""
    _given.num_batches += 1


def num_given() -> int:
    """The number of batches that this thread was given in this epoch."""
    return _given.num_batches


def count_dealt() -> None:
    """Notes that this thread was given its rank's own rows of one more batch."""
    _given.num_dealt += 1


def num_dealt() -> int:
    """The number of batches of which this thread was given its rank's own rows, in all epochs."""
    return _given.num_dealt
