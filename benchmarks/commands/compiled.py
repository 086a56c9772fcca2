"""python -m benchmarks compiled"""

from __future__ import annotations

from pathlib import Path

from mixmesh.cli.output import Json, print_json, seconds, table

from .common import Out, app, command_line, progress_bar, write_rows
from .order import Quick


@app.command()
def compiled(
    quick: Quick = False,
    out: Out = Path("out/bench/compiled.json"),
    as_json: Json = False,
) -> None:
    """A transformer of 24 layers on one device: PyTorch's own steps, compiled or not, and ours."""
    from ..compiled import FULL, QUICK, report, run

    with progress_bar(1) as (say, advance):
        rows = run(QUICK if quick else FULL, say)
        advance()
    made = report(rows, command_line())
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    eager_s = rows[0].median_s
    shown = [
        (r.name, seconds(r.median_s), f"{seconds(min(r.step_s))} - {seconds(max(r.step_s))}",
         f"{r.median_s / eager_s:.2f}", seconds(r.first_s))
        for r in rows
    ]  # fmt: skip
    print(table(("", "a step", "least - most", "of eager", "the first one"), shown))
    for text, value in made["ratios"].items():
        print(f"  {value:.2f}  {text}")
    for text, is_met in made["targets"].items():
        print(f"  {'met   ' if is_met else 'MISSED'}  {text}")
    print(f"written to {out}")
