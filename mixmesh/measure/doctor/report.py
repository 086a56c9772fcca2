"""Runs all checks in order, each with its findings and seconds, and makes the table of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...cluster.detection.inventory import FoundDevice
from ...errors import MixmeshError
from . import card_checks, checks, file_checks, job_checks, ladder, link_checks, uneven, versions
from .ground import Asked, Ground, Note

Status = Literal["ok", "note", "wrong", "not tried"]

# (name, names of the checks that must pass first, function)
Row = tuple[str, tuple[str, ...], Callable[[Ground], str | Note]]
ALWAYS: tuple[Row, ...] = (
    ("rendezvous", (), checks.rendezvous),
    ("versions", (), versions.versions),
    ("devices", (), checks.devices),
    ("reachable", ("rendezvous",), checks.reachability),
    ("names", ("rendezvous",), checks.names),
    ("collectives", ("devices", "reachable"), checks.collectives),
    ("shared memory", (), checks.shared_memory),
    ("cache", (), checks.cache),
)
THOROUGH: tuple[Row, ...] = (
    ("clocks and power", ("devices",), card_checks.clocks_and_power),
    ("peer to peer", ("devices",), card_checks.peer_to_peer),
    ("uneven pieces", ("collectives",), uneven.uneven),
    ("links", ("collectives",), link_checks.links),
    ("ladder", ("uneven pieces",), ladder.ladder),
)
OF_JOB: tuple[Row, ...] = (
    ("job code", (), job_checks.job_code),
    ("model", ("job code",), job_checks.model),
    ("data", ("job code",), job_checks.data),
)
OF_CLUSTER: tuple[Row, ...] = (("cluster file", ("devices",), file_checks.cluster_file),)
OF_PLAN: tuple[Row, ...] = (("plan", ("devices",), file_checks.plan_file),)
OF_PLAN_AND_JOB: tuple[Row, ...] = (("plan of the job", ("plan", "model"), file_checks.plan_of_job),)


@dataclass(frozen=True)
class Check:
    """One check: its findings, or its error with what to do about it. ``ranks`` are those at fault, if
    known."""

    name: str
    status: Status
    found: str
    time_s: float
    expected: str = ""
    got: str = ""
    where: str = ""
    hint: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """The report: all checks in order, the devices of all ranks if known, and the figures of all ranks by
    name."""

    checks: tuple[Check, ...]
    devices: tuple[FoundDevice, ...]
    world_size: int
    columns: dict[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        """Whether all checks have passed."""
        return all(check.status in ("ok", "note") for check in self.checks)

    @property
    def time_s(self) -> float:
        """Seconds of all checks, counted from the moment when all ranks had arrived: the first check waits
        for the last rank to start."""
        return sum(check.time_s for check in self.checks[1:])

    def verdict(self, rank: int) -> str:
        """``ok``, or the names of the checks that failed because of ``rank``; a check without a rank at fault
        is about all of them."""
        names = [c.name for c in self.checks if c.status == "wrong" and (not c.ranks or rank in c.ranks)]
        return ", ".join(names) or "ok"


def examine(ground: Ground) -> Report:
    """Makes the report of all ranks, the same on each except for the times. Collective. Failed checks raise
    nothing; after a rank that does not come in time nothing more is tried."""
    checks_so_far: list[Check] = []
    for name, needs, function in rows_of(ground.asked):
        lacking = [
            check.name
            for check in checks_so_far
            if check.name in needs and check.status in ("wrong", "not tried")
        ]
        if checks_so_far and ground.is_over or lacking:
            reason = f"needs {lacking[0]}" if lacking else "a rank is missing"
            checks_so_far.append(Check(name, "not tried", reason, 0.0))
        else:
            ground.progress(name)
            checks_so_far.append(tried(name, partial(function, ground)))
    checks.leave_group(ground)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    columns = {name: tuple(values) for name, values in ground.columns.items()}
    return Report(tuple(checks_so_far), tuple(ground.devices), world_size, columns)


def rows_of(asked: Asked) -> tuple[Row, ...]:
    """The requested checks, in their order."""
    with_job, with_plan = asked.job_name is not None, asked.plan_file is not None
    return (
        *ALWAYS,
        *(OF_CLUSTER if asked.cluster_file is not None else ()),
        *(OF_PLAN if with_plan else ()),
        *(OF_JOB if with_job else ()),
        *(OF_PLAN_AND_JOB if with_job and with_plan and not asked.is_quick else ()),
        *(() if asked.is_quick else THOROUGH),
    )


def tried(name: str, function: Callable[[], str | Note]) -> Check:
    """Runs ``function`` as a check: ``ok`` or ``note`` with its return value, ``wrong`` with its error."""
    started = time.perf_counter()
    try:
        outcome = function()
    except MixmeshError as error:
        time_s = time.perf_counter() - started
        fields = error.expected, error.got, error.where, error.hint, error.ranks
        return Check(name, "wrong", error.message, time_s, *fields)
    time_s = time.perf_counter() - started
    if isinstance(outcome, Note):
        return Check(name, "note", outcome.found, time_s, hint=outcome.hint, ranks=outcome.ranks)
    return Check(name, "ok", outcome, time_s)
