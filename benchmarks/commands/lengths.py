"""python -m benchmarks lengths"""

from __future__ import annotations

from pathlib import Path

from mixmesh.cli.output import Json, print_json, seconds, table

from .common import Out, app, command_line, progress_bar, write_rows
from .order import Quick


@app.command()
def lengths(
    quick: Quick = False,
    out: Out = Path("out/bench/lengths.json"),
    as_json: Json = False,
) -> None:
    """BERT on texts that are padded to the longest of their batch: DDP, and ours."""
    from ..lengths import report, run

    with progress_bar(3) as (say, advance):
        rows = run(12 if quick else 90, lambda name: (say(name), advance()) and None)
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
