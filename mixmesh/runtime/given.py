"""Counts the batches that the loaders of ``mixmesh.prepare`` have given to a loop, so that in every call the
ranks can tell whether their rows belong to the same one. A thread that loads ahead counts for itself."""

from __future__ import annotations

import threading


class _Given(threading.local):
    num_batches = 0


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
