"""All checks in their order, each with what it found and how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..detection.inventory import FoundDevice
from ..errors import MixmeshError
from . import checks, job_checks
from .ground import Ground

Status = Literal["ok", "wrong", "not tried"]

# name, the names of those without which it says nothing, and what is called
ALWAYS: tuple[tuple[str, tuple[str, ...], Callable[[Ground], str]], ...] = (
    ("rendezvous", (), checks.rendezvous),
    ("versions", (), checks.versions),
    ("devices", (), checks.devices),
    ("reachable", ("rendezvous",), checks.reachability),
    ("collectives", ("devices", "reachable"), checks.collectives),
    ("shared memory", (), checks.shared_memory),
    ("cache", (), checks.cache),
)
OF_JOB: tuple[tuple[str, tuple[str, ...], Callable[[Ground], str]], ...] = (
    ("job code", (), job_checks.job_code),
    ("model", ("job code",), job_checks.model),
    ("data", ("job code",), job_checks.data),
)


@dataclass(frozen=True)
class Check:
    """One check: what was found, or why it is wrong, with what to do about it."""

    name: str
    status: Status
    found: str
    time_s: float
    expected: str = ""
    got: str = ""
    where: str = ""
    hint: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All checks in their order, and the devices of all ranks where they were found."""

    checks: tuple[Check, ...]
    devices: tuple[FoundDevice, ...]
    world_size: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.status == "ok" for check in self.checks)

    @property
    def time_s(self) -> float:
        """Seconds of all checks from when all ranks were there: the first one waits for the last to start."""
        return sum(check.time_s for check in self.checks[1:])


def examine(ground: Ground) -> Report:
    """The report of all ranks, the same on each but for the times. Collective. Nothing is raised for what is
    wrong; a rank that does not come in time ends what can be tried."""
    made: list[Check] = []
    for name, needs, function in (*ALWAYS, *(OF_JOB if ground.job_name is not None else ())):
        lacking = [check.name for check in made if check.name in needs and check.status != "ok"]
        if made and ground.is_over or lacking:
            reason = f"needs {lacking[0]}" if lacking else "a rank is missing"
            made.append(Check(name, "not tried", reason, 0.0))
        else:
            made.append(tried(name, partial(function, ground)))
    return Report(tuple(made), tuple(ground.devices), int(os.environ.get("WORLD_SIZE", "1")))


def tried(name: str, function: Callable[[], str]) -> Check:
    """The check that ``function`` makes: ``ok`` with what it returns, ``wrong`` with what it raises."""
    started = time.perf_counter()
    try:
        found = function()
    except MixmeshError as error:
        return Check(
            name,
            "wrong",
            error.message,
            time.perf_counter() - started,
            error.expected,
            error.got,
            error.where,
            error.hint,
        )
    return Check(name, "ok", found, time.perf_counter() - started)
