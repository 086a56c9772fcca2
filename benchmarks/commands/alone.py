"""python -m benchmarks alone"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from mixmesh.cli.output import Json, print_json, seconds, table
from mixmesh.errors import InputError

from .common import Out, app, command_line, progress_bar, write_rows
from .order import Quick

Only = Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="Only this network; repeat.")]
Samples = Annotated[int, typer.Option(min=2, help="Images of a step.")]
Pixels = Annotated[int, typer.Option(min=32, help="Pixels of a side.")]


@app.command()
def alone(
    only: Only = None,
    samples: Samples = 4,
    pixels: Pixels = 224,
    quick: Quick = False,
    out: Out = Path("out/bench/alone.json"),
    as_json: Json = False,
) -> None:
    """Networks for images on one device: PyTorch's own steps, and ours."""
    from ..alone import NAMES, ROUNDS, run
    from ..revision import revision

    if unknown := sorted(set(only or ()) - set(NAMES)):
        raise InputError(f"no network {unknown[0]!r}", expected=", ".join(NAMES), got=unknown[0])
    names = only or NAMES
    with progress_bar(len(names)) as (say, advance):
        rows = []
        for row in run(names, samples, pixels, 3 if quick else ROUNDS, say):
            rows.append(row)
            advance()
    shown = [asdict(row) | {"ratio": row.ratio} for row in rows]
    made = {"command": command_line(), "revision": revision(), "rows": shown}
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    lines = []
    for r in rows:
        spread = f"{r.ratio:.2f} ({min(r.ratios):.2f} - {max(r.ratios):.2f})"
        medians = [seconds(median(step_s)) for step_s in (r.eager_s, r.ours_s)]
        lines.append((r.name, *medians, spread, "agree" if r.losses_agree else "DIFFER"))
    print(table(("", "PyTorch", "ours", "ours / PyTorch", "first losses"), lines))
    print(f"written to {out}")
