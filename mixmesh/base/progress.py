"""Reports progress and decisions to people, on the first rank's standard error."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from .callers import line_of_script, warn

AGAIN_S = 10.0  # seconds after which a long stage is reported again
Say = Callable[[str], None]
_warned_of: set[str] = set()  # warnings that this process has printed


def nothing(text: str) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class Teller:
    """Reports progress: ``update`` is called at every small step, ``line`` prints a line that stays."""

    update: Say = nothing
    line: Say = nothing

    def __call__(self, text: str) -> None:
        self.update(text)


@contextmanager
def telling(rank: int, doing: str) -> Iterator[Teller]:
    """A context with a Teller on the first rank: on a terminal it shows a line that changes; elsewhere it
    prints a line for each stage, and another every ``AGAIN_S`` seconds of a long one. Other ranks report
    nothing."""
    if rank:
        yield Teller()
    elif sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True, highlight=False, soft_wrap=True)
        with console.status(doing) as status:
            yield Teller(
                lambda text: status.update(f"{doing}: {text}"), lambda text: console.print(text, markup=False)
            )
    else:
        yield Teller(lines_of(doing, tell), tell)


def lines_of(doing: str, print_line: Say, clock: Callable[[], float] = time.monotonic) -> Say:
    """A function that may be called at every small step and prints only a few lines."""
    stage, told_at = "", clock()

    def say(text: str) -> None:
        nonlocal stage, told_at
        name = re.sub(r" \d.*", "", text.split(":")[0])
        if name != stage:
            stage, told_at = name, clock()
            print_line(f"{doing}: {name}")
        elif clock() - told_at >= AGAIN_S:
            told_at = clock()
            print_line(f"{doing}: {text}")

    return say


def tell(text: str) -> None:
    """Prints a line on standard error. A line that cannot be written is lost: the disk of a log file is full,
    the reader of a pipe is gone, or the terminal is closed. None of these may end a training, or the thread
    that watches it."""
    _print(text, sys.stderr)


def say(text: str) -> None:
    """Prints a line on standard output, or loses it in the same cases as ``tell``."""
    _print(text, sys.stdout)


def _print(text: str, stream: TextIO | None) -> None:
    if stream is None:  # closed: print would write to standard output
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        if stream not in _failed:
            _failed.append(stream)
            atexit.register(_leave_unwritten, stream)


_failed: list[TextIO] = []  # streams on which a line could not be written


def has_lost_lines(stream: TextIO) -> bool:
    """Whether ``tell`` or ``say`` could not write a line on this stream."""
    return stream in _failed


def _leave_unwritten(stream: TextIO) -> None:
    """Drops the lines that a stream still holds at the end if they cannot be written now either: Python would
    end with status 120, and a launcher would take a training that is done for one that has failed."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            send_nowhere(stream.fileno())


def send_nowhere(descriptor: int) -> None:
    """Lets everything that is written to a file descriptor from now on be lost."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def tell_warning(text: str) -> None:
    """Prints a warning for the people who watch the training."""
    tell(f"mixmesh: warning: {text}")


def flush_output() -> None:
    """Writes what standard output and standard error still hold, as before a fork, whose child would write it
    once more."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()


def warn_once(text: str) -> None:
    """Warns at the script's own line; without a script, prints the text once on standard error."""
    if line_of_script():
        warn(text)
    elif text not in _warned_of:
        _warned_of.add(text)
        tell(f"warning: {text}")
