"""The findings that checks share, and what they say alike."""

from __future__ import annotations

from pathlib import Path

from ..detection.inventory import FoundDevice
from ..job import Job
from ..runtime.comm import backend_for, default_device
from .meeting import Meeting


class Ground:
    """The findings that checks build on: the meeting of all ranks, their hosts and devices, the job."""

    def __init__(
        self, timeout_s: float, job_name: str | None, cache: Path, meeting: Meeting | None = None
    ) -> None:
        self.timeout_s, self.job_name, self.cache = timeout_s, job_name, cache
        self._meeting = meeting
        self.device = default_device()
        self.backend = backend_for(self.device)
        self.machines: tuple[tuple[int, ...], ...] = ()  # the ranks that one launcher started on one host
        self.hosts: list[str] = []
        self.devices: list[FoundDevice] = []
        self.job: Job | None = None

    @property
    def meeting(self) -> Meeting:
        """The meeting of all ranks, opened when it is first asked for."""
        if self._meeting is None:
            self._meeting = Meeting.open(self.timeout_s)
        return self._meeting

    @property
    def is_over(self) -> bool:
        """Whether the ranks have not all met, or do not any more."""
        return self._meeting is None or self._meeting.is_over

    @property
    def is_abandoned(self) -> bool:
        """Whether a thread of this process waits in a collective that will not end."""
        return self._meeting is not None and self._meeting.is_abandoned

    def close(self) -> None:
        """Leaves together with the others."""
        if self._meeting is not None:
            self._meeting.close()


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 rank``, ``2 ranks``, ``3 batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"
