"""mixmesh doctor"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.progress import telling
from ..errors import InputError, MixmeshError
from .output import Json, print_json, seconds, table
from .prepare import CacheFolder

if TYPE_CHECKING:
    from ..measure.doctor import Report


def doctor(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="Compare this job's code, model and first batches, too."),
    ] = None,
    job_option: Annotated[str | None, typer.Option("--job", metavar="JOB", help="The same as [JOB].")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="C.toml", help="Compare devices and links with this cluster file."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="X.plan", help="Compare this plan file on all ranks, and their devices with it."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Only checks that take a second or two: measure and train nothing."),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, metavar="S", help="Wait this long for a rank.")
    ] = 60.0,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> None:
    """Say whether ranks can train together: started as the training will be, or alone for this machine."""
    if job is not None and job_option is not None:
        raise InputError("the job is named twice", expected="one of them", got=f"{job}, --job {job_option}")
    from ..cluster.detection.cache import default_folder
    from ..measure.doctor import Asked, Ground, examine

    asked = Asked(job or job_option, cluster, plan, quick)
    with telling(int(os.environ.get("RANK", "0")), "doctor") as say:
        ground = Ground(timeout_s, asked, cache or default_folder(), progress=say)
        on_termination(ground.end)
        report = examine(ground)
    if os.environ.get("RANK", "0") == "0":
        show(report, as_json)
    elif ground.is_over:  # the first rank may be missing
        print("\n".join(wrong_lines(report)), file=sys.stderr, flush=True)
    ground.close()
    if ground.is_abandoned:  # Python cannot exit while a thread is blocked in native code
        sys.stdout.flush()
        os._exit(1)
    if not report.ok:
        raise typer.Exit(1)


def on_termination(end: Callable[[], object]) -> None:
    """Makes SIGTERM call ``end``: a launcher sends it as soon as one rank fails, but the first rank still has
    to print its report."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: end())


def show(report: Report, as_json: bool) -> None:
    """Prints the checks, remedies for those that failed, and a row for each rank with its verdict."""
    if as_json:
        print_json(report_object(report))
        return
    rows = [(c.name, c.status, seconds(c.time_s) if c.time_s else "-", c.found) for c in report.checks]
    print(table(("check", "", "time", ""), rows))
    for line in wrong_lines(report):
        print(line)
    if report.columns:
        print(f"\n{rank_table(report)}")
    wrong = sum(check.status == "wrong" for check in report.checks)
    text = "all is well" if report.ok else f"{wrong} of {len(report.checks)} checks wrong"
    print(f"\n{text}, {seconds(report.time_s)} from when all ranks were there", flush=True)


def rank_table(report: Report) -> str:
    """A row for each rank with its figures and its verdict. Figures that no rank has are listed below."""
    absent = [name for name, values in report.columns.items() if set(values) <= {"not there"}]
    shown = {name: values for name, values in report.columns.items() if name not in absent}
    rows = [
        (
            str(rank),
            *(values[rank].replace(", digest", "") for values in shown.values()),
            report.verdict(rank),
        )
        for rank in range(report.world_size)
    ]
    text = table(("rank", *shown, "verdict"), rows)
    return text + (f"\n  not there on any rank: {', '.join(absent)}" if absent else "")


def wrong_lines(report: Report) -> list[str]:
    """The lines of the checks that failed (expected, got, hints), and of those with a note."""
    lines = []
    for check in report.checks:
        if check.status == "wrong" or check.hint:
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
    """The report as an object for JSON."""
    devices = [
        {"rank": rank, "host": d.host, "kind": d.kind, "name": d.name, "memory_bytes": d.memory_bytes}
        for rank, d in enumerate(report.devices)
    ]
    ranks = [
        {
            "rank": rank,
            "verdict": report.verdict(rank),
            **{n: values[rank] for n, values in report.columns.items()},
        }
        for rank in range(report.world_size)
    ]
    return {
        "ok": report.ok,
        "time_s": report.time_s,
        "world_size": report.world_size,
        "checks": [asdict(check) for check in report.checks],
        "devices": devices,
        "ranks": ranks,
    }
