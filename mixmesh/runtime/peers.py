"""The states of all ranks in the store of ``torch.distributed``: each writes its own and reads the
others'."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .awake import AwakeClock
from .processes import (
    LAUNCHER_VARIABLE,
    is_gone,
    is_stopped,
    memory_kills,
    process_place,
    process_state,
)


@dataclass(frozen=True)
class Seen:
    """The state that a rank wrote last. ``calls`` has its last calls by number, ``lines`` the lines of its
    script that made them."""

    beat: int
    place: str
    pid: int
    number: int
    doing: str
    for_s: float
    waiting: str
    calls: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    ended: str = ""
    verdict: dict[str, Any] | None = None
    lines: dict[str, str] = field(default_factory=dict)
    at: str = ""  # the current line of its script, when it is outside of calls
    failed_at: int = 0  # the number of its last call that failed


class Peers:
    """The other ranks as this one has seen them.

    ``store_is_lost``: the connection to the store has ended. ``store_is_silent``: the store has not answered
    for as long as a rank may be silent. It may answer again: looking up a name can hold it up for seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        heartbeat_s: float,
        clock: AwakeClock | None = None,
    ) -> None:
        self._store, self._clock = store, clock or AwakeClock()
        store.set_timeout(timedelta(seconds=max(heartbeat_s, 2.0)))
        self.store_is_lost = self.store_is_silent = False
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        # each rank's last state, and the time of its last new beat
        self._seen: dict[int, tuple[Seen, float]] = {}
        self._gone: set[int] = set()
        self._kills = memory_kills()

    def write(self, state: Seen) -> None:
        """Shows the others the state of this rank."""
        with self._asking():
            self._store.set(_key(self._rank), json.dumps(vars(state)))

    def read(self) -> None:
        """Reads the states of the ranks that have written one."""
        with self._asking():
            there = [r for r in self._others if r in self._seen or self._store.check([_key(r)])]
            for rank, seen in _read(self._store, there).items():
                if rank not in self._seen or self._seen[rank][0].beat != seen.beat:
                    self._seen[rank] = (seen, self._clock.now_s)

    def meet(self, store: dist.Store) -> None:
        """Reads the states of ranks that have not been seen yet, so that a rank is noticed that stops before
        its next beat. All that have a watch have written one. ``store`` is this thread's connection."""
        with self._asking():
            there = [r for r in self._others if r not in self._seen and store.check([_key(r)])]
            for rank, seen in _read(store, there).items():
                self._seen.setdefault(rank, (seen, self._clock.now_s))

    def note_silence(self, *, is_silent: bool) -> None:
        """Notes whether the store is silent. When it answers again, the silence of all ranks begins anew,
        because none was able to write."""
        if self.store_is_silent and not is_silent:
            for rank, (seen, _) in self._seen.copy().items():
                self._seen[rank] = (seen, self._clock.now_s)
        self.store_is_silent = is_silent

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A context for asking the store. An answer that comes too late is left out; after any other error
        the store is lost."""
        try:
            yield
        except dist.DistStoreError:
            return
        except RuntimeError:
            self.store_is_lost = True

    def end_stopped(self, rank: int) -> None:
        """Kills the process of a rank on this machine that counts as lost because it is stopped. torchrun
        would kill it too, as it ends all processes of a start that has lost one, but only after 30 s."""
        seen = self._seen[rank][0] if rank in self._seen else None
        if seen is None or not seen.place == process_place() != "":
            return
        if LAUNCHER_VARIABLE in os.environ and process_state(seen.pid) == "T":
            with suppress(OSError):
                os.kill(seen.pid, signal.SIGKILL)

    def states(self) -> dict[int, Seen]:
        """The last state of every rank that was seen."""
        return {rank: seen for rank, (seen, _) in self._seen.copy().items()}

    def why_lost(self, rank: int, heartbeat_s: float) -> str:
        """The way in which a rank was lost; empty if it may still come."""
        seen, heard_at = self._seen[rank]
        is_here = seen.place == process_place() != ""
        if is_here and is_gone(seen.pid):
            if rank not in self._gone:  # its last word may come with the next beat
                self._gone.add(rank)
                return ""
            if not rank and self.store_is_lost:  # it held the store, with its last word
                return "has ended, and its last message with it: its script was over early, or it was killed"
            return f"has ended without a message: {self._why_gone()}"
        silent_s = self._clock.now_s - heard_at
        if silent_s < heartbeat_s:
            return ""
        if is_here:
            return f"is stopped (by a signal), for {silent_s:.0f} s" if is_stopped(seen.pid) else ""
        if (self.store_is_lost or self.store_is_silent) and rank:
            # without the store no rank can be heard; only rank 0, whose process holds it, is checked
            return ""
        return f"has not been heard of for {silent_s:.0f} s"

    def _why_gone(self) -> str:
        """The reasons for which a process of this machine may have ended without a word. A kill for lack of
        memory may have been that of another process."""
        kills = memory_kills()
        if self._kills is None or kills is None:
            return "it was killed, perhaps for taking too much memory, or it crashed"
        if kills > self._kills:
            return "it was killed for lack of memory, most likely, as the kernel has killed for that here"
        return "it crashed or was killed, and not by the kernel for lack of memory"

    def why_silent(self, rank: int, heartbeat_s: float) -> str:
        """Like ``why_lost``, for a rank that nobody waits for yet: it counts as lost only after silence,
        because a rank that has reached its end may be gone before its last message is read."""
        is_silent = self._clock.now_s - self._seen[rank][1] >= heartbeat_s
        return self.why_lost(rank, heartbeat_s) if is_silent else ""


def _read(store: dist.Store, ranks: Sequence[int]) -> dict[int, Seen]:
    """The states that ``ranks`` wrote last."""
    texts = store.multi_get([_key(rank) for rank in ranks]) if ranks else []
    return {rank: Seen(**json.loads(text)) for rank, text in zip(ranks, texts)}


def _key(rank: int) -> str:
    return f"mixmesh/watch/{rank}"
