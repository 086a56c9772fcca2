"""mixmesh doctor"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MixmeshError
from .output import Json, print_json, seconds, size, table
from .prepare import CacheFolder

if TYPE_CHECKING:
    from ..doctor import Report


def doctor(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Compare this job's code, model and first batches, too."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, metavar="S", help="A rank is waited for so long.")
    ] = 60.0,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> None:
    """Say whether ranks can train together: started as the training will be, or alone for this machine."""
    from ..detection.cache import default_folder
    from ..doctor import Ground, examine

    ground = Ground(timeout_s, job, cache or default_folder())
    report = examine(ground)
    if os.environ.get("RANK", "0") == "0":
        show(report, as_json)
    elif ground.is_over:  # the first rank may be the one that is missing
        print("\n".join(wrong_lines(report)), file=sys.stderr, flush=True)
    ground.close()
    if ground.is_abandoned:  # Python cannot end while a thread waits outside of it
        sys.stdout.flush()
        os._exit(1)
    if not report.ok:
        raise typer.Exit(1)


def show(report: Report, as_json: bool) -> None:
    """Prints the checks, what to do where one is wrong, and the devices."""
    if as_json:
        print_json(report_object(report))
        return
    rows = [(c.name, c.status, seconds(c.time_s) if c.time_s else "-", c.found) for c in report.checks]
    print(table(("check", "", "time", ""), rows))
    for line in wrong_lines(report):
        print(line)
    if report.devices:
        print()
        found = [(str(rank), d.host, d.name, size(d.memory_bytes)) for rank, d in enumerate(report.devices)]
        print(table(("rank", "host", "device", "memory"), found))
    wrong = sum(check.status == "wrong" for check in report.checks)
    text = "all is well" if report.ok else f"{wrong} of {len(report.checks)} checks wrong"
    print(f"\n{text}, {seconds(report.time_s)} from when all ranks were there", flush=True)


def wrong_lines(report: Report) -> list[str]:
    """The checks that failed, with what was expected and what to try."""
    lines = []
    for check in report.checks:
        if check.status == "wrong":
            error = MixmeshError(
                f"{check.name}: {check.found}",
                expected=check.expected,
                got=check.got,
                where=check.where,
                hint=check.hint,
            )
            lines += ["", *str(error).splitlines()]
    return lines


def report_object(report: Report) -> dict[str, Any]:
    """The report as JSON has it."""
    devices = [
        {"rank": rank, "host": d.host, "kind": d.kind, "name": d.name, "memory_bytes": d.memory_bytes}
        for rank, d in enumerate(report.devices)
    ]
    return {
        "ok": report.ok,
        "time_s": report.time_s,
        "world_size": report.world_size,
        "checks": [asdict(check) for check in report.checks],
        "devices": devices,
    }
