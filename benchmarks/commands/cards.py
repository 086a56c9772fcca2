"""python -m benchmarks cards"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mixmesh.cli.output import Json, print_json, table

from .common import Out, app, command_line, progress_bar, write_rows


@app.command()
def cards(
    each: Annotated[bool, typer.Option("--each", help="Also print each card.")] = False,
    out: Out = Path("out/bench/cards.json"),
    as_json: Json = False,
) -> None:
    """Training throughputs of single cards, predicted from their datasheets, beside published ones."""
    from ..cards import report, run, score
    from ..published_cards import MODELS, THROUGHPUTS

    rows = []
    with progress_bar(len(MODELS) * sum(map(len, THROUGHPUTS.values()))) as (_, advance):
        for row in run():
            rows.append(row)
            advance()
    made = report(rows, command_line())
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    if each:
        lines = [
            (
                r.model,
                r.dtype,
                r.card,
                f"{r.published:.0f}",
                f"{r.predicted:.0f}",
                f"{r.predicted / r.published:.2f}",
            )
            for r in rows
        ]
        print(table(("model", "dtype", "card", "published, 1/s", "predicted, 1/s", "ratio"), lines), "\n")
    scores = [(s.model, s.dtype, f"{s.bias:.2f}", f"{s.spread:.1%}", f"{s.rank:.3f}") for s in score(rows)]
    print(table(("model", "dtype", "predicted / published", "spread over cards", "rank"), scores))
    print(f"\nwritten to {out}")
