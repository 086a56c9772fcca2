"""Notes a lost rank in the log of a training; one of the remaining ranks writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.run_log import FAULT, mark_line

if TYPE_CHECKING:
    from ..runtime.lost import Lost, Position


def note_faults(log: Path | None, is_shared: bool) -> None:
    """Makes this process note a lost rank in ``log``, if it is the first of the remaining ones.
    ``is_shared``: all ranks see the same file; otherwise only the first rank writes."""
    from ..runtime.watch import running_watch

    watch = running_watch()
    if watch is not None and log is not None:
        watch.on_lost = noter(log, watch.rank, is_shared)


def noter(log: Path, rank: int, is_shared: bool) -> Callable[[Lost, Position], None]:
    """A function that adds a line about a lost rank to ``log``. The watch calls it, in another thread than
    the training's: each line is one write to the end of the file."""

    def note(lost: Lost, position: Position) -> None:
        if rank != (0 if lost.rank or not is_shared else 1):
            return
        device = position.devices[lost.rank] if lost.rank < len(position.devices) else None
        why = f"{lost.how}: {lost.word}"
        step = max((position.step or 1) - 1, 0)  # completed steps: the current one will not be completed
        line = mark_line(FAULT, step, time.time(), rank=lost.rank, device=device, why=why)
        try:
            with log.open("a") as file:
                file.write(line)
        except OSError:
            pass  # the disk itself may have failed; the error about the lost rank is what counts

    return note
