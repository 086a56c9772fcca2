"""Common to the commands of ``benchmarks``: the group they join, the file of rows, the progress bar."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from mixmesh.cli.output import print_json
from mixmesh.errors import InputError

Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Only this job, cluster or JOB@CLUSTER; repeat."),
]
Keep = Annotated[Path | None, typer.Option("--keep", metavar="FOLDER", help="Keep profiles and plans here.")]
Out = Annotated[Path, typer.Option("--out", metavar="R.json", help="Write the rows here.")]

Say = Callable[[str], None]
Result = TypeVar("Result")

app = typer.Typer(help="The project's own comparisons.", no_args_is_help=True, rich_markup_mode=None)


def command_line() -> str:
    """The command that is running, for the file that it writes."""
    arguments = sys.argv[1:]
    return shlex.join(["python", "-m", "benchmarks", *arguments[arguments[:1] == ["bench"] :]])


def write_rows(made: dict, out: Path) -> None:
    """The results as JSON; the file is whole or not there."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f"{out.name}.partial{os.getpid()}")
        partial.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n")
        partial.replace(out)
    except OSError as error:
        raise InputError(f"the rows cannot be written: {error.strerror}", where=str(out)) from None


@contextmanager
def progress_bar(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A progress bar on stderr, if that is a terminal: functions to set its text and to advance it."""
    if not sys.stderr.isatty():
        yield lambda text: None, lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield (lambda text: progress.update(task, description=text)), (lambda: progress.advance(task))


def case_by_case(
    count: int,
    run: Callable[[Say], Iterator[Result]],
    shown: Callable[[Result], str],
    report: Callable[[Sequence[Result]], dict],
    out: Path,
    as_json: bool,
) -> dict:
    """Prints each of ``count`` results as soon as it is there, and writes all results so far; then prints
    which targets were met. Returns the report."""
    results: list[Result] = []
    with progress_bar(count) as (say, advance):
        for result in run(say):
            results.append(result)
            advance()
            if not as_json:
                print(shown(result), "\n", flush=True)
            write_rows(report(results), out)  # keeps the rows so far, if a later case fails
    made = report(results)
    if as_json:
        print_json(made)
        return made
    print(f"{made['targets_met']} of {made['targets']} targets met; written to {out}")
    if {*made["emulation"]} - {"quota"}:
        print("warning: without quotas and limits these times and memories say nothing of a mixed cluster")
    return made
