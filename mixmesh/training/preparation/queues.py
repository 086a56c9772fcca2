"""Keeps what the workers of a loader end by, until their iterator is gone."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import finalize

KEPT = "_mixmesh_keeps_queues"


def keep_queues(batches: Iterator) -> None:
    """Makes the queues of an iterator's workers outlive it. A parallel model and its loader refer to each
    other, so that a script's next ones leave persistent workers to the collector of cycles. It would close
    their queues first, and PyTorch then waits 5 s for each worker, which nothing tells to end."""
    queues = getattr(batches, "_index_queues", None)
    if queues and not hasattr(batches, KEPT):
        setattr(batches, KEPT, True)
        finalize(batches, len, [*queues, batches._worker_result_queue]).atexit = False  # type: ignore[attr-defined]
