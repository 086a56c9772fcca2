"""python -m benchmarks lengths"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mixmesh.cli.output import Json, print_json, seconds, table

from .common import Out, app, command_line, progress_bar, write_rows
from .order import Quick

Architectures = Annotated[
    bool, typer.Option("--architectures", help="Which models of transformers traces with symbols serve.")
]


@app.command()
def lengths(
    quick: Quick = False,
    architectures: Architectures = False,
    out: Out = Path("out/bench/lengths.json"),
    as_json: Json = False,
) -> None:
    """BERT on texts that are padded to the longest of their batch: DDP, and ours."""
    if architectures:
        _of_architectures(as_json)
        return
    from ..lengths import report, run

    with progress_bar(1) as (say, advance):
        rows = run(12 if quick else 90, say)
        advance()
    made = report(rows, command_line())
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    shown = [
        (r.name, str(r.num_lengths), seconds(r.total_s), seconds(r.last_s), seconds(max(r.step_s[1:])))
        for r in rows
    ]
    print(table(("", "lengths", f"{len(rows[0].step_s)} steps", "one of the last", "the longest"), shown))
    print(f"losses {'agree' if made['losses_agree'] else 'DIFFER'}; written to {out}")


def _of_architectures(as_json: bool) -> None:
    from ..many_sizes import run

    with progress_bar(1) as (say, advance):
        rows = run(say)
        advance()
    if as_json:
        print_json({"command": command_line(), "rows": [asdict(row) for row in rows]})
        return
    others = [r for r in rows if r.served < r.shapes]
    print(table(("", "shapes", "served", "wrong"), [tuple(map(str, asdict(r).values())) for r in others]))
    print(f"{len(rows) - len(others)} of {len(rows)} architectures are served in all shapes")
