"""One process per device of a cluster: what the emulated and the plain run have in common."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Bed(ABC):
    """A context manager: everything that entering made is gone after leaving, however it is left.

    ``spawn`` once, then ``wait``, or ``poll`` while changing rates and shares. Or ``start`` launchers on
    machines, which start the ranks themselves. Use it from one thread: what it started dies with it.
    """

    emulation: Emulation

    def __init__(self, cluster: Cluster, *, on_output: OnOutput | None = None) -> None:
        self.cluster = cluster
        self._processes = Processes(on_output)
        self._start_s = time.monotonic()
        self._handlers: dict[signal.Signals, object] = {}

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _rank_env(self, rank: int) -> dict[str, str]: ...

    @abstractmethod
    def _entering(self, rank: int) -> Callable[[], None]:
        """The function that the child calls before it runs its program."""

    @abstractmethod
    def _entering_machine(self, machine: int | None) -> Callable[[], None]:
        """The function that a launcher calls before it runs its program; beside all machines with None."""

    @abstractmethod
    def address(self, machine: int | None) -> str:
        """Where the others reach a machine; None is a place beside all machines."""

    @abstractmethod
    def _result(self, number: int, rank: Rank) -> RankResult: ...

    @abstractmethod
    def set_rate(self, machine: int, bytes_per_s: float) -> None:
        """Change a machine's network rate while a job runs."""

    @abstractmethod
    def set_share(self, rank: int, share: float) -> None:
        """Change a device's share of a CPU core while a job runs."""

    @abstractmethod
    def set_link(self, machine: int, is_up: bool) -> None:
        """Cut a machine off from the network, or join it again."""

    @abstractmethod
    def take_memory(self, rank: int) -> None:
        """Lower a device's memory limit to what it holds now: it is killed when it asks for more."""

    @abstractmethod
    def return_memory(self, rank: int) -> None:
        """Give a device the memory limit back that the cluster has for it."""

    @abstractmethod
    def make_disk(self, size_bytes: int) -> Path:
        """A folder with so much room, which all machines see that are started on afterwards."""

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
        # a second Ctrl-C must not stop the cleaning up
        held = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, *_ENDING)} if in_main else {}
        try:
            self._processes.close()
            self._close()
        finally:
            for number, handler in (held | self._handlers).items():
                if handler is not None:  # it was not Python's
                    signal.signal(number, handler)  # type: ignore[arg-type]

    def _catch_signals(self) -> None:
        def end(number: int, _: object) -> None:
            raise SystemExit(128 + number)

        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, end) for number in _ENDING}

    def spawn(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Start argv once for every device. ``env`` is added to this process's, and has the last word."""
        if self._processes.ranks:
            raise InputError("this bed has been used", hint="make another one for another run")
        if not argv:
            raise InputError("no command to run", expected="a program and its arguments")
        self._start_s = time.monotonic()
        for rank in range(self.cluster.world_size):
            whole = {**_clean_env(), **self._common_env(rank), **self._rank_env(rank), **(env or {})}
            self._processes.start(rank, [str(word) for word in argv], whole, self._entering(rank))

    def start(self, machine: int | None, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> int:
        """Start argv on a machine, outside of its devices, or beside all machines (None); the number that
        stands for it in ``returncode``, ``pid`` and the output. On a machine with one device, ranks that it
        starts come into the device by ``join_device`` and ``enter_device``."""
        number = self.cluster.world_size + len(self._processes.ranks)
        local = () if machine is None else self.cluster.ranks_of(machine)
        device = self._device_env(local[0]) if len(local) == 1 else {}
        whole = {**_clean_env(), **self._launched_env(), **device, **(env or {})}
        self._processes.start(number, [str(word) for word in argv], whole, self._entering_machine(machine))
        return number

    def returncode(self, number: int) -> int | None:
        """The status of what was started, as ``subprocess`` has it; None while it runs."""
        return self._processes.ranks[number].returncode

    def pid(self, number: int) -> int:
        """The process id of what was started."""
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
            "PYTHONUNBUFFERED": "1",  # a killed rank's last words
            "MIXMESH_TESTBED": "1",
            "MIXMESH_EMULATION": self.emulation,
            EMULATED_VARIABLE: f"{self.emulation} {self.cluster.fingerprint}",
        }

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Pass on output for this long; whether ranks still run."""
        deadline = time.monotonic() + timeout_s
        while self._processes.running:
            left_s = deadline - time.monotonic()
            self._processes.poll(max(0.0, min(POLL_S, left_s)))
            if left_s <= 0:
                break
        return bool(self._processes.running)

    def wait(self, *, timeout_s: float | None = None, grace_s: float = 2.0, check: bool = True) -> RunResult:
        """Wait for all ranks. When one fails, the others have ``grace_s`` to end by themselves.

        Raises ``DeviceLost`` for the rank that failed, or for the time; ``check=False`` returns it instead.
        """
        late: list[int] = []
        stop_s = None  # when the ranks still running are told to end
        told: signal.Signals | None = None
        while self._processes.running:
            self._processes.poll(POLL_S)
            now = time.monotonic()
            failed = [r.end_time_s for r in self._processes.ranks.values() if r.returncode]
            if failed and stop_s is None:
                stop_s = min(failed) + grace_s
            if timeout_s is not None and not failed and now > self._start_s + timeout_s:
                late, stop_s = late or self._processes.running, stop_s or now
            if stop_s is not None and now >= stop_s:
                told = self._end(told, kills=now >= stop_s + TERM_TO_KILL_S)
        time_s = time.monotonic() - self._start_s
        self._processes.drain()
        results = tuple(self._result(n, self._processes.ranks[n]) for n in range(self.cluster.world_size))
        culprit = self._culprit(results)
        lost = device_lost(self.cluster, culprit) if culprit else None
        if timeout_s is not None and late:
            lost = timed_out(timeout_s, late)
        result = RunResult(results, self.emulation, time_s, lost)
        return result.check() if check else result

    def _end(self, told: signal.Signals | None, *, kills: bool) -> signal.Signals:
        """Tells the ranks that still run to end, once by each signal; returns the one that they were told."""
        number = signal.SIGKILL if kills else signal.SIGTERM
        if number is not told:
            self._processes.end(number)
        return number

    def _culprit(self, results: tuple[RankResult, ...]) -> RankResult | None:
        """The rank that failed first. A lost peer makes others fail within moments: a death outweighs a
        status."""
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
