"""Marks stretches of a process during which it only takes part in a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CollectiveError

_stretches: list[str] = []  # stretches that are under way in this process, the innermost last


@contextmanager
def taking_part(what: str) -> Iterator[None]:
    """A context for a stretch in which this process is useless without the other ranks, even between two
    calls: when one is lost, the watch may end it wherever it is. Such an error leaves the context only to end
    the process."""
    _stretches.append(what)
    try:
        yield
    except CollectiveError:
        raise
    except BaseException:
        _stretches.pop()
        raise
    else:
        _stretches.pop()


def current_stretch() -> str:
    """The name of the stretch that is under way; empty outside of all."""
    return _stretches[-1] if _stretches else ""
