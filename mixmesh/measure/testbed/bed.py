"""The common part of emulated and plain runs: one process per device of a cluster."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import default_int_handler
from typing import Self

from ...cluster import Cluster
from ...errors import InputError
from .device import (
    COMPUTE_VARIABLE,
    EMULATED_VARIABLE,
    FREE_VARIABLE,
    JOIN_VARIABLE,
    MEMORY_PEAK_VARIABLE,
)
from .processes import OnOutput, Processes, Rank
from .result import Emulation, RankResult, RunResult, device_lost, timed_out

POLL_S = 0.05
TERM_TO_KILL_S = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Bed(ABC):
    """A context manager that removes everything that it created, in whatever way it is left.

    Either call ``spawn`` once, then ``wait``, or ``poll`` while changing rates and shares. Or ``start``
    launchers on machines, which start the ranks themselves. Use it from one thread: its processes end with
    that thread.
    """

    emulation: Emulation

    def __init__(self, cluster: Cluster, *, on_output: OnOutput | None = None) -> None:
        self.cluster = cluster
        self._processes = Processes(on_output)
        self._start_s = time.monotonic()
        self._handlers: dict[signal.Signals, object] = {}
        self._ended_by: int | None = None  # the number of a signal that this process got

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _rank_env(self, rank: int) -> dict[str, str]: ...

    @abstractmethod
    def _entering(self, rank: int) -> Callable[[], None]:
        """The function that a rank's process calls before it starts its program."""

    @abstractmethod
    def _entering_machine(self, machine: int | None) -> Callable[[], None]:
        """The function that a launcher's process calls before it starts its program; None stands for the
        place outside of all machines."""

    @abstractmethod
    def address(self, machine: int | None) -> str:
        """The address of a machine as seen by the others; None stands for the place outside of all
        machines."""

    @abstractmethod
    def _result(self, number: int, rank: Rank) -> RankResult: ...

    @abstractmethod
    def set_rate(self, machine: int, bytes_per_s: float) -> None:
        """Changes a machine's network rate while a job runs."""

    @abstractmethod
    def set_share(self, rank: int, share: float) -> None:
        """Changes a device's share of a CPU core while a job runs."""

    @abstractmethod
    def set_link(self, machine: int, is_up: bool) -> None:
        """Disconnects a machine from the network, or connects it again."""

    @abstractmethod
    def take_memory(self, rank: int) -> None:
        """Lowers a device's memory limit to its current use, so that it is killed when it allocates more.
        Another call lowers the limit further if the device has freed memory since."""

    @abstractmethod
    def return_memory(self, rank: int) -> None:
        """Restores a device's memory limit to that of the cluster."""

    @abstractmethod
    def make_disk(self, size_bytes: int) -> Path:
        """Creates a folder of limited size, which processes started later see on all machines."""

    def __enter__(self) -> Self:
        self._catch_signals()
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        # so that a second Ctrl-C does not stop the clean-up
        held = {s: signal.signal(s, signal.SIG_IGN) for s in _ENDING} if in_main else {}
        try:
            self._processes.close()
            self._close()
        finally:
            for number, handler in (held | self._handlers).items():
                if handler is not None:  # None stands for a handler that Python did not install
                    signal.signal(number, handler)  # type: ignore[arg-type]

    def _catch_signals(self) -> None:
        def end(number: int, _: object) -> None:
            self._ended_by = number
            self._raise_if_ended()

        if threading.current_thread() is threading.main_thread():
            caught = [n for n in _ENDING if n != signal.SIGINT or signal.getsignal(n) is default_int_handler]
            self._handlers = {number: signal.signal(number, end) for number in caught}

    def _raise_if_ended(self) -> None:
        """Raises once more what a signal's handler raised: Python only prints an exception raised while it
        runs a callback of a weak reference or a finalizer."""
        if self._ended_by == signal.SIGINT:
            raise KeyboardInterrupt
        if self._ended_by is not None:
            raise SystemExit(128 + self._ended_by)

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Starts argv once for every device. ``env`` is added to this process's environment."""
        if self._processes.ranks:
            raise InputError("this bed has been used", hint="make another one for another run")
        if not argv:
            raise InputError("no command to run", expected="a program and its arguments")
        self._start_s = time.monotonic()
        for rank in range(self.cluster.world_size):
            whole = {**_clean_env(), **self._common_env(rank), **self._rank_env(rank), **(env or {})}
            self._processes.start(rank, [str(word) for word in argv], whole, self._entering(rank))

    def start(self, machine: int | None, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> int:
        """Starts argv on a machine but outside of its devices, or outside of all machines (None). Returns the
        number of the process for ``returncode``, ``pid`` and the output. On a machine with one device, ranks
        that it starts enter the device by ``join_device`` and ``enter_device``."""
        number = self.cluster.world_size + len(self._processes.ranks)
        local = () if machine is None else self.cluster.ranks_of(machine)
        device = self._device_env(local[0]) if len(local) == 1 else {}
        whole = {**_clean_env(), **self._launched_env(), **device, **(env or {})}
        self._processes.start(number, [str(word) for word in argv], whole, self._entering_machine(machine))
        return number

    def returncode(self, number: int) -> int | None:
        """The status of a process, as in ``subprocess``; None while it runs."""
        return self._processes.ranks[number].returncode

    def pid(self, number: int) -> int:
        """The process id of a process."""
        return self._processes.ranks[number].process.pid

    def _device_env(self, rank: int) -> dict[str, str]:
        return {name: text for name, text in self._rank_env(rank).items() if not name.startswith("MASTER_")}

    def _common_env(self, rank: int) -> dict[str, str]:
        machine = self.cluster.machine_index_of(rank)
        local = self.cluster.ranks_of(machine)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.cluster.world_size),
            "LOCAL_RANK": str(local.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "GROUP_RANK": str(machine),
            **self._launched_env(),
        }

    def _launched_env(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # so that the last output of a killed rank is not lost
            "MIXMESH_TESTBED": "1",
            "MIXMESH_EMULATION": self.emulation,
            EMULATED_VARIABLE: f"{self.emulation} {self.cluster.fingerprint}",
        }

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Passes on output for this many seconds. Returns whether any rank still runs."""
        deadline = time.monotonic() + timeout_s
        while self._processes.running:
            self._raise_if_ended()
            left_s = deadline - time.monotonic()
            self._processes.poll(max(0.0, min(POLL_S, left_s)))
            if left_s <= 0:
                break
        return bool(self._processes.running)

    def wait(self, *, timeout_s: float | None = None, grace_s: float = 2.0, check: bool = True) -> RunResult:
        """Waits for all ranks. When one fails, the others have ``grace_s`` to end by themselves.

        Raises ``DeviceLost`` for the rank that failed, or when time is over; with ``check=False`` returns it
        instead.
        """
        late: list[int] = []
        stop_s: float | None = None  # the time at which the remaining ranks get a signal
        sent: signal.Signals | None = None
        while self._processes.running:
            self._raise_if_ended()
            self._processes.poll(POLL_S)
            now = time.monotonic()
            failure_s = self._first_failure_s()
            if failure_s is not None:
                stop_s = stop_s or failure_s + grace_s
            elif timeout_s is not None and now > self._start_s + timeout_s:
                late, stop_s = late or self._processes.running, stop_s or now
            if stop_s is not None and now >= stop_s:
                sent = self._end(sent, kills=now >= stop_s + TERM_TO_KILL_S)
        time_s = time.monotonic() - self._start_s
        self._processes.drain()
        results = tuple(self._result(n, self._processes.ranks[n]) for n in range(self.cluster.world_size))
        culprit = self._culprit(results)
        lost = device_lost(self.cluster, culprit) if culprit else None
        if timeout_s is not None and late:
            lost = timed_out(timeout_s, late)
        result = RunResult(results, self.emulation, time_s, lost)
        return result.check() if check else result

    def _first_failure_s(self) -> float | None:
        return min((r.end_time_s for r in self._processes.ranks.values() if r.returncode), default=None)

    def _end(self, sent: signal.Signals | None, *, kills: bool) -> signal.Signals:
        """Sends the ranks that still run SIGTERM or SIGKILL, unless it is the one ``sent`` before; returns
        it."""
        number = signal.SIGKILL if kills else signal.SIGTERM
        if number is not sent:
            self._processes.end(number)
        return number

    def _culprit(self, results: tuple[RankResult, ...]) -> RankResult | None:
        """The rank that failed first. As others fail within moments of losing a peer, a rank that was killed
        counts before one that exited."""
        failed = [r for r in results if r.returncode and not r.ended_by_launcher]
        ends = {r.rank: self._processes.ranks[r.rank].end_time_s for r in failed}

        def order(r: RankResult) -> tuple[bool, bool, float, int]:
            deadly = r.returncode < 0 and ends[r.rank] < min(ends.values()) + 2 * POLL_S
            return (not r.killed_by_memory_limit, not deadly, ends[r.rank], r.rank)

        return min(failed, key=order, default=None)


def _clean_env() -> dict[str, str]:
    """This process's environment without the device of an outer testbed."""
    outer = (COMPUTE_VARIABLE, FREE_VARIABLE, JOIN_VARIABLE, MEMORY_PEAK_VARIABLE, "GLOO_SOCKET_IFNAME")
    return {key: value for key, value in os.environ.items() if key not in outer}
