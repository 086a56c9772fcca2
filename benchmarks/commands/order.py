"""python -m benchmarks order"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, seconds, table

from .common import Keep, Only, Out, app, case_by_case, command_line

if TYPE_CHECKING:
    from ..contest import Contest, ContestResult

Quick = Annotated[bool, typer.Option("--quick", help="One case, and few steps.")]


@app.command()
def order(
    only: Only = None,
    quick: Quick = False,
    out: Out = Path("out/bench/order.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Execution order by b-levels against first come first served and DDP's buckets, in the testbed."""
    from ..order import CASES, QUICK

    contests("order", CASES, QUICK, only, quick, out, keep, as_json)


def contests(
    bench: str,
    every: tuple[Contest, ...],
    few: tuple[Contest, ...],
    only: list[str] | None,
    quick: bool,
    out: Path,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Holds them one by one, prints each, and writes the rows."""
    from ..contest import hold, report
    from ..measure import each_case, named
    from ..training_cases import FULL, SHORT

    chosen = named(only or (), few if quick else every, every, lambda c: (str(c), c.job))
    effort = SHORT if quick else FULL
    case_by_case(
        len(chosen),
        lambda say: each_case(chosen, keep, lambda contest, folder: hold(contest, effort, folder, say)),
        shown,
        lambda results: report(bench, results, command_line()),
        out,
        as_json,
    )


def shown(result: ContestResult) -> str:
    faster = result.speedups
    rows = [
        (
            t.name,
            seconds(result.predicted_s[t.name]),
            seconds(t.median_s),
            f"{min(t.rounds_s):.3f} - {max(t.rounds_s):.3f}",
            f"{faster[t.name].median:.2f} ({faster[t.name].least:.2f} - {faster[t.name].most:.2f})"
            if t.name in faster
            else "-",
        )
        for t in result.timings
    ]
    lines = [str(result.contest), table(("", "predicted", "a step", "rounds", "ours is faster by"), rows)]
    lines += [f"  {'met   ' if met else 'MISSED'}  {target}" for target, met in result.targets.items()]
    return "\n".join(lines)
