"""python -m benchmarks planning"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, table

from .common import Out, app, command_line, progress_bar, write_rows

if TYPE_CHECKING:
    from ..planning import Row


@app.command()
def planning(
    quick: Annotated[bool, typer.Option("--quick", help="The small cases only.")] = False,
    out: Out = Path("out/bench/planning.json"),
    as_json: Json = False,
) -> None:
    """Seconds that planning takes, by layers, devices, memory, experts and parallel branches."""
    from ..planning import CASES, report, run

    chosen = [case for case in CASES if case.quick or not quick]
    rows: list[Row] = []
    with progress_bar(len(chosen)) as (say, advance):
        for row in run(chosen, say):
            rows.append(row)
            advance()
    made = report(rows, command_line())
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    print(shown(rows))
    print(f"\nwritten to {out}")


def shown(rows: list[Row]) -> str:
    header = ("model", "size", "devices", "memory", "trace", "search", "ratios", "simulate", "polish",
              "total", "cpu", "states", "gap", "target", "")  # fmt: skip
    lines = [
        (
            r.model, str(r.size), str(r.devices), f"{r.memory:.0%}",
            *(f"{s:.2f}" for s in (r.trace_s, r.search_s, r.ratios_s, r.simulate_s, r.polish_s, r.total_s)),
            f"{r.cpu_s:.2f}", str(r.states_expanded), "-" if r.gap is None else f"{r.gap:.1%}",
            "-" if r.target_s is None else f"{r.target_s:.2f}", {True: "met", False: "missed"}.get(r.met, ""),
        )
        for r in rows
    ]  # fmt: skip
    return table(header, lines) + "\n\nSeconds; total and cpu are planning without tracing."
