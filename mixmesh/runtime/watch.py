"""A side channel to the collectives: what every rank is doing, and whether it is still there.

Once a second a thread of every rank writes the rank's current call of mixmesh into the store of
``torch.distributed``, and reads the other ranks' entries. A rank that waits long in a collective then learns
why:

- the others are in another call (only one rank evaluates or saves), or got other input:
  an error on all ranks;
- a rank has failed or ended: an error, with its reason;
- a rank has been silent for ``heartbeat_s`` and its process is stopped or gone: an error. A process on this
  machine that still runs does not count as lost, as its thread may be waiting for the interpreter's lock;
- a rank is between two calls (it writes a file): a notice, and the wait goes on up to the time-out.

A rank that is silent for ``heartbeat_s`` ends the others even if they do not wait for it: in a call that
computes, and in a stretch in which a process only takes part in a training (``taking_part``).

A thread that is blocked in gloo is woken by shutting the sockets of this program's groups. A process that is
still there ``GRACE_S`` later, whatever holds it up, is ended by the watch itself, with the message. Code of a
script outside of calls is left alone: its next call raises the error.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..base.callers import line_of_error, line_of_script
from ..base.progress import tell
from ..errors import CollectiveError
from .agreement import Facts, Round
from .awake import AwakeClock
from .failures import limit_error
from .job_failures import OF_WORKER, named_line, place_of
from .launch_store import is_of_launcher, own_connection, store_of_start
from .lost import Lost, Position, Waiting, error_of, fields_of
from .peers import Peers, Seen
from .processes import process_place, shut
from .taking_part import current_stretch
from .verdicts import different_calls, late_ranks, ranks_outside, stay_text

BEAT_S = 1.0
STUCK_S = 5.0  # seconds in one collective after which the other ranks are checked
NOTICE_S = 10.0
MISSED_S = 3.0
GRACE_S = 5.0  # seconds for a process to end itself after the watch has found that a rank is lost
# seconds for the others to read why the process that holds the store ends: two beats, and one to spare
HEARD_S = 3.0
KEPT_CALLS = 16  # latest calls of each rank that are compared
STDERR = 2
THREADS = "mixmesh "  # begins the names of the threads of mixmesh
WATCHING = "watching the other ranks"
BACKWARD = "backward"  # a call that begins within a backward pass, and ends with it


class Watch:
    """The watch of one process; ``call`` and ``waiting`` are used by the thread that computes."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, heartbeat_s: float) -> None:
        self.rank, self.world_size, self.heartbeat_s = rank, world_size, heartbeat_s
        self._clock = AwakeClock()
        self._peers = Peers(own_connection(store), rank, world_size, heartbeat_s, self._clock)
        self._store = own_connection(store)
        self.sockets: dict[int, int] = {}
        self.number, self.doing, self.since = 0, "", time.monotonic()
        self.waiting: Waiting | None = None
        self.position = Position()
        # the optimizer whose steps are counted, while it exists
        self._counted: Callable[[], Any] = lambda: None
        self.on_lost: Callable[[Lost, Position], object] = lambda lost, position: None
        # whether a signal has asked the process to stop
        self.is_told_to_stop: Callable[[], bool] = lambda: False
        self._calls: dict[int, str] = {}
        self._lines: dict[int, str] = {}  # lines of the script, by number of the call
        self._thread = threading.get_ident()  # the thread that computes
        self._failed = self._ended = ""
        self._failed_at = 0  # the number of the last call that has failed on this rank
        self._verdict: CollectiveError | None = None
        self._lost: Lost | None = None  # the rank that the verdict is about
        self._decided_at = 0.0
        self._noticed = self._asked = False
        self._beat = 0
        self._over = threading.Event()
        self._write()  # written before any exchange, so that ranks that have met can be checked
        self._asked_at: float | None = None  # since when the store has not answered
        self._threads = [
            threading.Thread(target=run, name=f"{THREADS}{name}", daemon=True)
            for name, run in (("tells", self._tell), ("watches", self._watch))
        ]
        self._start_threads()
        atexit.register(self.close)

    def _start_threads(self) -> None:
        """Raises CollectiveError if the system has no more threads, and tells the others, who would wait for
        this rank without end."""
        begun = []
        try:
            for thread in self._threads:
                thread.start()
                begun.append(thread)
        except RuntimeError as error:
            self._over.set()
            for thread in begun:
                thread.join(2 * BEAT_S)
            limited = limit_error(self.rank, WATCHING, error)
            if limited is None:
                raise
            self.leave(limited)
            self._write()
            raise limited from error

    @property
    def is_of_this_thread(self) -> bool:
        """Whether this is the thread that computes: other threads, which write checkpoints, make no calls."""
        return threading.get_ident() == self._thread

    # --- the computing thread -------------------------------------------------------------------------

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """A context for a call in which ranks meet; a call within another one is a part of it."""
        if self.doing and self.doing != BACKWARD:
            yield
            return
        outer = self.doing if is_in_backward() else ""
        self.begin(kind)
        try:
            yield
        except BaseException as error:  # an interrupt, or a CheckpointException, which is not an Exception
            self.fail(error)
            raise
        finally:
            self.end()
            self.doing = outer

    def meet(self, kind: str) -> None:
        """Notes a collective of all ranks, which counts as a separate call outside of any call. Only the
        computing thread notes them."""
        is_within = self.doing and (self.doing != BACKWARD or is_in_backward())
        if self.is_of_this_thread and not is_within:
            self.begin(kind)
            self.end()

    def begin(self, kind: str) -> None:
        """Begins a call. Raises the error that the watch has found since the last call."""
        self.raise_verdict()
        self.number += 1
        self._calls[self.number], self._lines[self.number] = kind, line_of_script()
        for kept in (self._calls, self._lines):
            kept.pop(self.number - KEPT_CALLS, None)
        self.doing, self.since = kind, time.monotonic()

    def end(self) -> None:
        self.doing, self.since = "", time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Tells the others why this rank stops."""
        if error is not self._verdict:
            self._failed = _with_line(_one_line(error), self._lines.get(self.number, ""))
            self._failed_at = self.number

    def leave(self, error: Exception) -> None:
        """Tells the others that this rank will not return."""
        self._ended = _one_line(error)

    def exchange(self, facts: Facts, what: str, timeout_s: float) -> list[Facts]:
        """The facts of all ranks on the call that is under way, by rank. Collective."""
        key = f"mixmesh/facts/{self.number}"
        self.waiting = Waiting.now(what)
        try:
            of = (self._store, key, self.rank, self.world_size, what, timeout_s, self.raise_verdict)
            told = Round(*of).exchange(facts)
            self.meet_peers()
            return told
        finally:
            self.waiting = None

    def meet_peers(self) -> None:
        """Makes sure that a rank is noticed which stops before its next beat. All ranks have begun their
        watches."""
        self._peers.meet(self._store)

    def count_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes errors name the current step, counted by the steps of the first optimizer that is given, or
        of another one when that is gone."""
        if self._counted() is None:
            self._counted = weakref.ref(optimizer)
            self.set_step(0)
            optimizer.register_step_post_hook(lambda *_: self._next_step())

    def step_is_left_out(self) -> None:
        """Counts a step that the optimizer leaves out."""
        self._next_step()

    def _next_step(self) -> None:
        if self.position.step is not None:
            self.set_step(self.position.step)

    def set_step(self, num_steps: int) -> None:
        """Notes that ``num_steps`` steps have been made in all."""
        self.position = replace(self.position, step=num_steps + 1)

    def raise_verdict(self) -> None:
        if self._verdict is not None:
            raise self._verdict

    def explain(self, timeout_s: float | None = None) -> CollectiveError | None:
        """The reason why a collective has failed, if a rank knows it; waits a little for a rank that may.
        Where this rank has waited for ``timeout_s``, that a rank has not come is a reason too."""
        self._asked = True
        deadline = time.monotonic() + 5 * BEAT_S
        while self._verdict is None and time.monotonic() < deadline and not self._over.is_set():
            # a launcher that ends all ranks ends this one's data workers too, which is not the reason
            with suppress(RuntimeError):
                time.sleep(0.05)
        late = ranks_outside(self.number, self._peers.states())
        if self._verdict is not None or timeout_s is None or self.waiting is None or not late:
            return self._verdict
        rank, seen = next(iter(late.items()))
        lost = Lost(rank, f"has not come within {timeout_s:g} s", stay_text(seen))
        return self.position.error(lost, self.waiting, self.world_size)

    def close(self) -> None:
        """Tells the others that this process ends, and why if it failed."""
        if self._over.is_set():
            return
        self._over.set()
        last = getattr(sys, "last_value", None)
        self._ended = self._ended or self._last_words(last)
        for thread in self._threads:
            thread.join(2 * BEAT_S)
        if not self._peers.store_is_lost and not any(thread.is_alive() for thread in self._threads):
            self._write()
            has_failed = self._failed and self._failed_at == self.number
            if not self.rank and not is_of_launcher() and (self._verdict or has_failed or last):
                self._wait_until_heard()
        atexit.unregister(self.close)

    def _last_words(self, last: BaseException | None) -> str:
        """The reason why this rank ends: the ``last`` error, which nobody has caught, or that it is done."""
        if last is not None:
            return _with_line(f"after {_one_line(last)}", line_of_error(last))
        if not self.number:
            return "its script is over"
        last_call = _with_line(self._calls[self.number], self._lines[self.number])
        return f"its script is over; its last call was {last_call}"

    def _wait_until_heard(self) -> None:
        """Keeps the store, which ends with this process, until all others know the reason: they have ended or
        reached a verdict of their own. Without the store they would only notice that nobody answers."""
        deadline = time.monotonic() + HEARD_S
        while time.monotonic() < deadline and not self._peers.store_is_lost:
            self._peers.read()
            if all(seen.ended or seen.verdict for seen in self._peers.states().values()):
                return
            time.sleep(self._pause_s / 4)

    # --- the watching thread --------------------------------------------------------------------------

    @property
    def _pause_s(self) -> float:
        return min(BEAT_S, self.heartbeat_s / 4) * max(1.0, self.world_size / 64)

    def _tell(self) -> None:
        """Writes this rank's state and reads those of the others; a store whose process is stopped does not
        answer."""
        while not self._peers.store_is_lost:
            self._asked_at = self._clock.now_s
            if not threading.main_thread().is_alive():
                self._note_error()
            self._write()
            self._peers.read()
            self._asked_at = None
            if self._over.wait(self._pause_s):
                return

    def _note_error(self) -> None:
        """Tells the others of the error that has ended the script, although threads of the script, which may
        wait for ever, still keep the process. While a thread writes a checkpoint, all ranks wait for it."""
        is_writing = any(t.name.startswith(THREADS) and not t.daemon for t in threading.enumerate())
        if (last := getattr(sys, "last_value", None)) is not None and not is_writing:
            self._ended = self._ended or self._last_words(last)

    def _watch(self) -> None:
        while not self._over.wait(self._pause_s):
            self._clock.tick(most_s=3 * self._pause_s)
            asked_at = self._asked_at
            is_late = asked_at is not None and self._clock.now_s - asked_at > self.heartbeat_s
            self._peers.note_silence(is_silent=is_late)
            if self._verdict is None:
                self._judge()
            elif self._clock.now_s - self._decided_at > GRACE_S and self._is_taking_part:
                self._end_process(self._verdict)

    @property
    def _is_taking_part(self) -> bool:
        """Whether this process is useless without the others. While the script's own code runs it is not, as
        that may save something. After the end of the main thread it is: then at most a thread that writes a
        checkpoint holds up the end."""
        is_in_mixmesh = bool(current_stretch() or self.doing or self.waiting)
        return is_in_mixmesh or self.is_told_to_stop() or not threading.main_thread().is_alive()

    @staticmethod
    def _end_process(verdict: CollectiveError) -> None:
        """Ends the process, as a last resort. Takes no lock that another thread may hold."""
        os.write(STDERR, f"{type(verdict).__name__}: {verdict}\n".encode())
        os._exit(verdict.exit_status)

    def _write(self) -> None:
        self._beat += 1
        now, waiting = time.monotonic(), self.waiting
        calls, lines = ({str(n): text for n, text in list(d.items())} for d in (self._calls, self._lines))
        verdict = None if self._verdict is None else fields_of(self._verdict, self._lost)
        at = "" if self.doing else line_of_script(self._thread)
        state = Seen(
            self._beat, process_place(), os.getpid(), self.number, self.doing, now - self.since,
            waiting.what if waiting else "", calls, self._failed, self._ended, verdict, lines, at,
            self._failed_at,
        )  # fmt: skip
        self._peers.write(state)

    def _judge(self) -> None:
        """Draws conclusions from the states of the other ranks."""
        states, waiting = self._peers.states(), self.waiting
        told = next((seen.verdict for seen in states.values() if seen.verdict is not None), None)
        if told is not None:
            return self._follow(told, waiting)
        if waiting is None:
            self._noticed = False
            doing = Waiting.now(self.doing or current_stretch() or "the end of its script", is_met=False)
            return self._judge_silent(states, doing) if self._is_taking_part else None
        if (gone := self._find_gone(states, waiting)) is not None:
            return self._lose(gone, waiting)
        if time.monotonic() - waiting.since < STUCK_S and not self._asked:
            return self._judge_silent(states, waiting)
        return self._judge_stuck(states, waiting)

    def _follow(self, told: dict[str, Any], waiting: Waiting | None) -> None:
        """Adopts another rank's conclusion, worded for the call that this rank waits in."""
        error, lost = error_of(told)
        if lost is not None and waiting is not None:
            error = self.position.error(lost, waiting, self.world_size)
        self._conclude(error, lost)

    def _find_gone(self, states: dict[int, Seen], waiting: Waiting) -> Lost | None:
        """A rank that has announced that it does not come to the call that this one waits in."""
        for rank, seen in states.items():
            # its script may have caught the error and be in the next call by now
            is_over = seen.number > self.number or not seen.doing
            if seen.failed and seen.failed_at == self.number and is_over:
                return Lost(rank, "has failed", seen.failed)
            if seen.ended:
                return Lost(rank, "has ended", seen.ended)
        return None

    def _judge_stuck(self, states: dict[int, Seen], waiting: Waiting) -> None:
        """Finds the reason why this rank has waited for long, or why its collective has failed."""
        # if a connection has failed, a rank of another machine that misses some beats counts as the lost one
        silent_s = min(self.heartbeat_s, MISSED_S) if self._asked else self.heartbeat_s
        for rank in states:
            if how := self._peers.why_lost(rank, silent_s):
                return self._lose(Lost(rank, how), waiting)
        error = different_calls(self.rank, dict(self._calls), dict(self._lines), states, waiting.what)
        if error is not None:
            return self._conclude(error)
        return self._notice(states, waiting.what, time.monotonic() - waiting.since)

    def _judge_silent(self, states: dict[int, Seen], waiting: Waiting) -> None:
        """Finds a rank that was lost, before this rank waits for it or has waited for long."""
        for rank, seen in states.items():
            if not seen.ended and (how := self._peers.why_silent(rank, self.heartbeat_s)):
                return self._lose(Lost(rank, how), waiting)

    def _notice(self, states: dict[int, Seen], what: str, waited_s: float) -> None:
        late = late_ranks(self.rank, self.number, states)
        if waited_s < NOTICE_S or self._noticed or not late:
            return
        self._noticed = True
        for rank, seen in late.items():
            tell(
                f"mixmesh: rank {self.rank} has waited for {waited_s:.0f} s in {what}: rank {rank} has been "
                f"{stay_text(seen)}; waiting on"
            )

    def _lose(self, lost: Lost, waiting: Waiting) -> None:
        self._conclude(self.position.error(lost, waiting, self.world_size), lost)

    def _conclude(self, error: CollectiveError, lost: Lost | None = None) -> None:
        self._lost, self._verdict, self._decided_at = lost, error, self._clock.now_s
        if lost is not None:
            self._peers.end_stopped(lost.rank)
            self.on_lost(lost, self.position)
        if not self._is_taking_part:
            text = f"mixmesh: {error.message}; the next call on this rank raises it"
            tell(text)
        # even if this rank waits for nothing: its checkpoint thread may be waiting in a group of its own
        shut(self.sockets)


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass. A pass that failed never reports its end."""
    return torch._C._current_graph_task_id() != -1


def _one_line(error: BaseException) -> str:
    """The class and the words of an error. Those of a data loader's worker stand after its traceback."""
    if OF_WORKER in str(error):
        return f"{named_line(error)} ({place_of(error)})"
    text = " ".join(str(getattr(error, "message", "") or error).split())[:300]
    return f"{type(error).__name__}: {text}"


def _with_line(text: str, line: str) -> str:
    return f"{text} ({line})" if line and OF_WORKER not in text else text


# the watch and the default group of this process; empty before the first
_of_process: list[tuple[object, Watch]] = []


@contextmanager
def in_call(kind: str) -> Iterator[None]:
    """A context for a call in which ranks meet, for code without a parallel model; within another call it is
    a part of that."""
    watch = running_watch()
    if watch is None:
        yield
        return
    with watch.call(kind):
        yield


def running_watch() -> Watch | None:
    """The watch of this process's default group, if it was begun."""
    is_running = _of_process and dist.is_initialized() and _of_process[0][0] is dist.group.WORLD
    return _of_process[0][1] if is_running else None


def watch_of_process(heartbeat_s: float, timeout_s: float) -> Watch | None:
    """The watch of this process's default group, begun at the first call; None for a single process, and if
    the store of the group has only one connection. Collective at the first call: raises CollectiveError if
    ranks do not come within ``timeout_s``."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    if _of_process and _of_process[0][0] is group:
        _of_process[0][1].heartbeat_s = heartbeat_s
        return _of_process[0][1]
    if _of_process:
        _of_process.pop()[1].close()
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if is_of_launcher():  # the script may have made the group itself
        store = store_of_start(store, rank, world_size, timeout_s)
    try:
        watch = Watch(store, rank, world_size, heartbeat_s)
    except (RuntimeError, NotImplementedError) as error:
        # the others watch, and a rank without a watch would let them wait
        if (limited := limit_error(rank, WATCHING, error)) is not None:
            raise limited from error
        return None
    _of_process.append((group, watch))
    return watch
