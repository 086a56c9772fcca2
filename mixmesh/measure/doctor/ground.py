"""The findings that checks share, and texts that several of them use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...cluster import Cluster
from ...cluster.detection.inventory import FoundDevice, Inventory
from ...frontend.job import Job
from ...lang.plan_file import Plan
from ...runtime.accelerator import take
from ...runtime.comm import backend_for, default_device
from .meeting import Meeting

LATER_S = 30.0


@dataclass(frozen=True)
class Asked:
    """The files against which ranks are checked. ``is_quick`` leaves out checks that exchange much data, or
    train."""

    job_name: str | None = None
    cluster_file: Path | None = None
    plan_file: Path | None = None
    is_quick: bool = False


@dataclass(frozen=True)
class Note:
    """A finding that is worth knowing but not a fault, with a hint and the ranks concerned."""

    found: str
    hint: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class Ground:
    """The findings that checks build on: the meeting of all ranks, their hosts and devices, the files read.

    ``columns`` are the figures of every rank, by name: the table of ranks."""

    job: Job  # set once its code is loaded
    plan: Plan  # set once its file is read

    def __init__(
        self,
        timeout_s: float,
        asked: Asked,
        cache: Path,
        meeting: Meeting | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.timeout_s, self.asked, self.cache, self.progress = timeout_s, asked, cache, progress
        self._meeting = meeting
        self.device = default_device()
        self.backend = backend_for(self.device)
        self.machines: tuple[tuple[int, ...], ...] = ()  # the ranks started by one launcher on one host
        self.hosts: list[str] = []
        self.devices: list[FoundDevice] = []
        self.columns: dict[str, list[str]] = {}
        self.cluster: Cluster | None = None

    @property
    def meeting(self) -> Meeting:
        """The meeting of all ranks, opened on first use."""
        if self._meeting is None:
            self._meeting = Meeting.open(self.timeout_s)
        return self._meeting

    @property
    def group_timeout_s(self) -> float:
        """The time-out of process groups: longer than the limit of a phase, because NCCL ends the process
        when it is reached."""
        return 2 * self.timeout_s + LATER_S

    def take_device(self) -> None:
        """Makes this rank's device the current one of the calling thread."""
        take(self.device)

    @property
    def inventory(self) -> Inventory:
        """The devices of all ranks."""
        return Inventory(tuple(self.devices))

    @property
    def is_over(self) -> bool:
        """Whether some ranks have not come to the meeting, or it has ended."""
        return self._meeting is None or self._meeting.is_over

    @property
    def is_abandoned(self) -> bool:
        """Whether a thread of this process waits in a collective that will never end."""
        return self._meeting is not None and self._meeting.is_abandoned

    def end(self) -> None:
        """Makes every wait end soon, like ``Meeting.end``."""
        if self._meeting is not None:
            self._meeting.end()

    def close(self) -> None:
        """Leaves the meeting together with the others."""
        if self._meeting is not None:
            self._meeting.close()


def count(number: int, noun: str) -> str:
    """Formats a number with its noun: ``1 rank``, ``2 ranks``, ``3 batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"
