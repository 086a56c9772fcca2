"""A plain process per device, on loopback: results are right, but times say nothing about the cluster."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from ...errors import TestbedUnavailable
from .bed import Bed
from .processes import Rank
from .result import RankResult


class PlainBed(Bed):
    """Processes without limits, which need no root: every device is as fast as this machine allows."""

    emulation = "none"

    def _open(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def _close(self) -> None:
        pass

    def _rank_env(self, rank: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _entering(self, rank: int) -> Callable[[], None]:
        return lambda: None

    def _entering_machine(self, machine: int | None) -> Callable[[], None]:
        return lambda: None

    def address(self, machine: int | None) -> str:
        return "127.0.0.1"

    def _result(self, number: int, rank: Rank) -> RankResult:
        return RankResult(
            rank=number,
            returncode=rank.returncode or 0,
            cpu_s=rank.cpu_s,
            throttled_s=0.0,
            memory_peak_bytes=rank.memory_peak_bytes,
            memory_limit_bytes=None,
            ended_by_launcher=rank.ended_by_launcher,
        )

    def set_rate(self, machine: int, bytes_per_s: float) -> None:
        raise TestbedUnavailable("a plain run has no network rate to change")

    def set_share(self, rank: int, share: float) -> None:
        raise TestbedUnavailable("a plain run has no CPU share to change")

    def set_link(self, machine: int, is_up: bool) -> None:
        raise TestbedUnavailable("a plain run has no link of its own to cut")

    def take_memory(self, rank: int) -> None:
        raise TestbedUnavailable("a plain run has no memory limit to lower")

    def return_memory(self, rank: int) -> None:
        raise TestbedUnavailable("a plain run has no memory limit")

    def make_disk(self, size_bytes: int) -> Path:
        raise TestbedUnavailable("a plain run has no disk of limited size")
