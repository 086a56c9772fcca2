"""python -m benchmarks coverage"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, table
from mixmesh.errors import InputError

from .common import app, command_line, progress_bar

if TYPE_CHECKING:
    from ..coverage import Row


@app.command()
def coverage(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Only this architecture or family; repeat."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="C.md", help="Write the table here, as Markdown.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Which architectures of transformers are traced, planned, and equal to one device."""
    from ..coverage import HEADER, cells, chosen, markdown, report, run, summary

    rows: list[Row] = []
    wanted = chosen(only or ())
    with progress_bar(len(wanted)) as (say, advance):
        for row in run(wanted, say):
            rows.append(row)
            advance()
    if out is not None:
        _write(markdown(rows, command_line()), out)
    if as_json:
        print_json(report(rows, command_line()))
    else:
        print(table(HEADER, map(cells, rows)))
        print()
        for row in rows:
            if row.reason:
                print(f"{row.name}: {row.reason}")
        print(summary(rows))
        if out is not None:
            print(f"written to {out}")
    if any(row.verified is False for row in rows):
        raise typer.Exit(1)


def _write(text: str, out: Path) -> None:
    partial = out.with_name(f"{out.name}.partial")  # the file is whole or not there
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(out)
    except OSError as error:
        raise InputError(f"the table cannot be written: {error.strerror}", where=str(out)) from None
