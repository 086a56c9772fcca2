"""The result of a run of one process per device."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from ...cluster import Cluster
from ...errors import DeviceLost

Emulation = Literal["quota", "none"]


@dataclass(frozen=True)
class RankResult:
    """The end of one rank. ``returncode`` is negative for a signal, as in ``subprocess``. If
    ``ended_by_launcher``, the launcher ended it because another one failed, or because the time was up."""

    rank: int
    returncode: int
    cpu_s: float
    throttled_s: float
    memory_peak_bytes: int | None
    memory_limit_bytes: int | None
    killed_by_memory_limit: bool = False
    ended_by_launcher: bool = False


@dataclass(frozen=True)
class RunResult:
    """The end of a run. With ``emulation`` "none" its times say nothing about the mixed cluster."""

    ranks: tuple[RankResult, ...]
    emulation: Emulation
    time_s: float
    lost: DeviceLost | None = None

    @property
    def ok(self) -> bool:
        return self.lost is None

    def check(self) -> RunResult:
        """Raises the ``DeviceLost`` that ended the run, if one did."""
        if self.lost is not None:
            raise self.lost
        return self


def device_lost(cluster: Cluster, result: RankResult) -> DeviceLost:
    """The error for a rank that failed or exceeded its memory."""
    device, machine = cluster.devices[result.rank], cluster.machine_of(result.rank)
    where = f'rank {result.rank} ({device.name}) on machine "{machine.name}"'
    if result.killed_by_memory_limit:
        return DeviceLost(
            f"{where} was killed by its memory limit",
            expected=f"at most {_mib(result.memory_limit_bytes)}",
            got=f"a peak of {_mib(result.memory_peak_bytes)}; {exit_text(result.returncode)}",
            hint=(
                "a smaller share of the batch for this device",
                "a larger memory_gib in the cluster file (the interpreter's own memory counts too)",
            ),
        )
    return DeviceLost(
        f"{where} ended early",
        expected="exit status 0",
        got=exit_text(result.returncode),
        hint="read what it wrote last, above",
    )


def timed_out(timeout_s: float, ranks: list[int]) -> DeviceLost:
    return DeviceLost(
        f"the run did not end within {timeout_s:g} s",
        expected="every rank to end",
        got="still running: " + ", ".join(f"rank {rank}" for rank in ranks),
    )


def exit_text(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    names = {s.value: s.name for s in signal.Signals}
    return f"killed by signal {-returncode} ({names.get(-returncode, 'unknown')})"


def _mib(size_bytes: int | None) -> str:
    return "an unknown size" if size_bytes is None else f"{size_bytes / 2**20:.1f} MiB"
