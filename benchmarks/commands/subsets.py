"""python -m benchmarks subsets"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, table
from mixmesh.errors import InputError

from .common import Out, app, command_line, progress_bar, write_rows

if TYPE_CHECKING:
    from ..subsets import Row


@app.command()
def subsets(
    pairs: Annotated[int, typer.Option("--pairs", metavar="N", help="How many pairs are drawn.", min=1)] = 60,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Other pairs for another number.")] = 0,
    search_seconds: Annotated[
        float | None,
        typer.Option("--search-seconds", metavar="S", help="Ask placed, heterog and tag too, so long each."),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", help="Pairs compared at once.", min=1)
    ] = 1,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="R.json", help="Show an earlier run beside this one.")
    ] = None,
    out: Out = Path("out/bench/subsets.json"),
    as_json: Json = False,
) -> None:
    """The plan of a cluster against those of its parts and of single planners, drawn at random."""
    from ..subsets import draw_pairs, report, run

    before = _read(against)
    drawn = draw_pairs(pairs, seed)
    rows: list[Row] = []
    with progress_bar(len(drawn)) as (say, advance):
        for row in run(drawn, search_s=search_seconds, processes=processes, progress=say):
            rows.append(row)
            advance()
            write_rows(report(rows, command_line()), out)  # keeps the rows so far, if a later pair fails
    if as_json:
        print_json(report(rows, command_line()))
        return
    print(shown(rows, before))
    print(f"\nwritten to {out}")


def _read(path: Path | None) -> dict[tuple[str, str], dict]:
    if path is None:
        return {}
    try:
        return {(r["job"], r["cluster"]): r for r in json.loads(path.read_text())["rows"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            "there are no rows of an earlier run", expected="a file that --out wrote", where=str(path)
        ) from None


def shown(rows: list[Row], before: dict[tuple[str, str], dict]) -> str:
    from ..subsets import TOLERANCE

    header = ("job", "cluster", "Gbit/s", "auto, ms", "planner", "fastest other", "ms", "times", "before",
              "auto before, ms", "planning, s")  # fmt: skip
    lines = [_line(r, before.get((r.job, r.cluster))) for r in rows]
    worst = max((r.times for r in rows), default=1.0)
    said = f"{sum(r.met for r in rows)} of {len(rows)} within 1 %; the worst is {worst:.3f} times as slow"
    if before:
        had = [old for r in rows if (old := before.get((r.job, r.cluster)))]
        within = sum((old["times"] or float("inf")) <= 1 + TOLERANCE for old in had)
        said += f"; before, {within} of {len(had)}"
    return table(header, lines) + f"\n\n{said}"


def _line(r: Row, old: dict | None) -> tuple[str, ...]:
    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.3f}"

    other = r.fastest_other
    return (
        r.job, r.cluster, f"{r.network_gbit_per_s:.2f}", ms(r.auto_s), r.planner or "-", other or "-",
        ms(r.others_s[other] if other else None), f"{r.times:.3f}",
        "-" if old is None or old["times"] is None else f"{old['times']:.3f}",
        ms(old and old["auto_s"]), f"{r.planning_s:.2f}",
    )  # fmt: skip
