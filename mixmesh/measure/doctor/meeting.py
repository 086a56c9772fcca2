"""Lets ranks exchange findings through the store of the launch, without collectives: a rank that fails is
heard just like one that succeeds. Nothing here lasts longer than its time limit."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ...errors import CollectiveError, InputError, MixmeshError
from ...runtime import launch_store
from ...runtime.agreement import Round
from ...runtime.comm import RANK_VARIABLES
from ...runtime.processes import is_gone, is_stopped, process_place

POLL_S = 0.02
LAST_WORDS_S = 5.0  # seconds to wait at the end for the first rank's output and the others' last reads
PREFIX = "mixmesh/measure/doctor"


class Meeting:
    """The ranks of one launch. ``is_over``: a rank is missing, so nothing more can be checked.
    ``is_abandoned``: a thread of this process still waits in a collective. ``processes`` gives the place and
    id of every rank's process, once known, so that one that ends is named at once."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self.is_over = self.is_abandoned = False
        self.processes: list[tuple[str, int]] = []
        self._number = 0
        self._ends_at: float | None = None

    @classmethod
    def open(cls, timeout_s: float) -> Meeting:
        """The meeting of this process with the others of its launch, or with itself. Raises InputError if
        some of a launcher's variables are missing, CollectiveError if the store is not reached in time."""
        if "RANK" not in os.environ:
            return cls(dist.HashStore(), 0, 1, timeout_s)
        missing = [name for name in RANK_VARIABLES if name not in os.environ]
        if missing:
            raise InputError(
                "this process was started with a rank, and not with all that it needs to find the others",
                expected=f"the variables {', '.join(RANK_VARIABLES)}",
                got=f"no {', '.join(missing)}",
                hint="torchrun --nproc-per-node gpu -m mixmesh doctor",
            )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(open_store(rank, timeout_s), rank, world_size, timeout_s)

    def gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """The JSON values that ``make`` returns on the ranks, by rank. Raises an error, on all ranks, that
        names the first rank on which ``make`` failed or took too long; CollectiveError if a rank does not
        come."""
        return self._exchange(what, self._run(what, make, lambda: False))

    def gather_here(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Like ``gather``, for a ``make`` that calls the user's code: it runs in the main thread, as in
        training."""

        def limited() -> Any:
            with alarm(what, self.timeout_s):
                return make()

        return self._exchange(what, outcome_of(limited))

    def gather_together(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Like ``gather``, for a ``make`` in which ranks wait for each other: if one of them fails, the
        others stop waiting."""
        failed = f"{PREFIX}/failed/{self._number}"
        outcome = self._run(what, make, lambda: self.store.check([failed]))
        if "error" in outcome:
            self.store.set(failed, "yes")
        return self._exchange(what, outcome)

    def end(self) -> None:
        """Ends every wait of this rank soon, because its launcher is ending all ranks after one has failed.
        May be called by a signal handler."""
        self._ends_at = time.monotonic() + LAST_WORDS_S / 2
        if signal.getitimer(signal.ITIMER_REAL)[0] > LAST_WORDS_S / 2:  # the user's code is running
            signal.setitimer(signal.ITIMER_REAL, LAST_WORDS_S / 2)

    def _run(self, what: str, make: Callable[[], Any], is_vain: Callable[[], bool]) -> dict[str, str]:
        """The outcome of ``make``, run in a separate thread; empty if waiting for it is pointless."""
        outcomes: list[dict[str, str]] = []
        thread = threading.Thread(target=lambda: outcomes.append(outcome_of(make)), daemon=True)
        thread.start()
        started = time.monotonic()
        try:
            while thread.is_alive() and not is_vain():
                if time.monotonic() - started > self.timeout_s:
                    return outcome_of(lambda: raise_late(what, self.timeout_s))
                self._check_alive(what)
                thread.join(POLL_S)
            return outcomes[0] if outcomes else {}
        except CollectiveError:
            self.is_over = True
            raise
        finally:
            self.is_abandoned = self.is_abandoned or thread.is_alive()

    def _exchange(self, what: str, outcome: dict[str, str]) -> list[Any]:
        self._number += 1
        key = f"{PREFIX}/{self._number}"
        # a late rank has used up its time: all others have come by now, if they come at all
        limit_s = LAST_WORDS_S if "late" in outcome else self.timeout_s + LAST_WORDS_S
        check = lambda: self._check_alive(what)  # noqa: E731
        try:
            told = Round(self.store, key, self.rank, self.world_size, what, limit_s, check).exchange(outcome)
        except CollectiveError:
            self.is_over = True
            raise
        late = tuple(rank for rank, one in enumerate(told) if "late" in one)
        for rank, one in enumerate(told):
            if "error" in one:
                raise error_of(rank, json.loads(one["error"]), late)
        return [json.loads(one["value"]) for one in told]

    def _check_alive(self, what: str) -> None:
        """Raises CollectiveError if a process of this machine has ended or is stopped, or the launcher ends
        this one."""
        here = process_place()
        for rank, (place, pid) in enumerate(self.processes):
            if rank == self.rank or place != here or not here:
                continue
            if is_gone(pid) or is_stopped(pid):
                raise CollectiveError(
                    f"rank {rank} {'has ended' if is_gone(pid) else 'is stopped by a signal'} in {what}",
                    expected=f"{self.world_size} ranks",
                    got=f"no process {pid}" if is_gone(pid) else f"process {pid} stands still",
                    hint="its own output says why; where it says nothing: dmesg | grep -i -e oom -e xid",
                    ranks=(rank,),
                )
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            raise CollectiveError(
                f"the launcher ends all ranks in {what}",
                expected="to run on",
                got="SIGTERM",
                hint="a rank has failed, on another machine perhaps: the launcher's output says which",
            )

    def close(self) -> None:
        """Keeps all ranks until the first one has reported: a launcher ends the others as soon as one fails,
        and the first rank's process may hold the store."""
        with suppress(RuntimeError):
            self.store.set(f"{PREFIX}/left/{self.rank}", "yes")
            awaited = [0] if self.rank or self.is_over else list(range(self.world_size))
            keys = [f"{PREFIX}/left/{rank}" for rank in awaited]
            deadline = time.monotonic() + LAST_WORDS_S
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_S)


def open_store(rank: int, timeout_s: float) -> dist.Store:
    """The store of the launch: torchrun's own, or else a store that the first rank serves."""
    serves = rank == 0 and not launch_store.is_of_launcher()
    place = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
    try:
        return launch_store.open_store(timeout_s, serves=serves)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} cannot serve the store of the launch"
            if serves
            else f"rank {rank} does not reach the store of the launch within {timeout_s:g} s",
            expected=place + (" to be free" if serves else " to answer"),
            got=first_line(error),
            hint=(
                "start the first machine's processes; let its firewall pass that port",
                "--rdzv-endpoint (MASTER_ADDR) must be a name of the first machine that all machines resolve",
            ),
            ranks=(rank,),
        ) from None


class Late(CollectiveError):
    """A rank took longer than its limit."""


def raise_late(what: str, limit_s: float) -> None:
    """Raises the error of a rank that took too long."""
    raise Late(
        f"{what} is not over within {limit_s:g} s",
        expected="some seconds",
        hint=(
            f"--timeout {2 * limit_s:g}, if the devices or links are as slow as that",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL (with GPUs NCCL_DEBUG=INFO, too): each rank says what it does",
        ),
    )


@contextmanager
def alarm(what: str, limit_s: float) -> Iterator[None]:
    """A context that raises Late in the main thread after ``limit_s``, and again after as long, since Python
    only prints an exception raised within a finalizer; in other threads, which get no signals, never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: raise_late(what, limit_s))
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(make: Callable[[], Any]) -> dict[str, str]:
    """The value that ``make`` returns as text, or the error that it raises as text."""
    try:
        return {"value": json.dumps(make())}
    except MixmeshError as error:
        fields = {"expected": error.expected, "got": error.got, "where": error.where, "hint": error.hint}
        text = json.dumps({"message": error.message, "ranks": error.ranks, **fields})
        return {"error": text, "late": "yes"} if isinstance(error, Late) else {"error": text}
    except (Exception, SystemExit) as error:  # errors of the user's code, or of a driver, may be of any kind
        return {"error": json.dumps({"message": f"{type(error).__name__}: {first_line(error)}"})}


def error_of(rank: int, fields: dict[str, Any], late: tuple[int, ...] = ()) -> InputError:
    """The error that a rank reported: about the ranks that it names, or else about itself and all ``late``
    ranks."""
    hint, ranks = tuple(fields.pop("hint", ())), tuple(fields.pop("ranks", ()))
    message = fields.pop("message")
    if ranks:
        return InputError(message, hint=hint, ranks=ranks, **fields)
    return InputError(f"rank {rank}: {message}", hint=hint, ranks=late if rank in late else (rank,), **fields)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to a readable length."""
    return (str(error).strip().splitlines() or [""])[0][:300]
