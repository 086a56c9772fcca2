"""mixmesh bench order"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..output import Json, print_json, seconds, table
from .common import Keep, Out, app, command_line, progress_bar, write_rows

if TYPE_CHECKING:
    from ...bench.contest import Contest, ContestResult

Quick = Annotated[bool, typer.Option("--quick", help="One case, and few steps.")]


@app.command()
def order(
    quick: Quick = False,
    out: Out = Path("out/bench/order.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Execution order by b-levels against first come first served and DDP's buckets, in the testbed."""
    from ...bench.order import CASES, QUICK

    contests("order", QUICK if quick else CASES, quick, out, keep, as_json)


def contests(
    bench: str, chosen: tuple[Contest, ...], quick: bool, out: Path, keep: Path | None, as_json: bool
) -> None:
    """Holds them one by one, prints each, and writes the rows."""
    from ...bench.contest import hold, report
    from ...bench.measure import case_folder
    from ...bench.training_cases import FULL, SHORT

    results: list[ContestResult] = []
    with progress_bar(len(chosen)) as (say, advance):
        for contest in chosen:
            with case_folder(keep, str(contest)) as folder:
                results.append(hold(contest, SHORT if quick else FULL, folder, say))
            advance()
            if not as_json:
                print(shown(results[-1]), "\n")
                sys.stdout.flush()
            write_rows(report(bench, results, command_line()), out)  # what there is, if a later case fails
    made = report(bench, results, command_line())
    if as_json:
        print_json(made)
        return
    print(f"{made['targets_met']} of {made['targets']} targets met; written to {out}")
    if made["emulation"] != ["quota"]:
        print("warning: without CPU quotas and network limits these times say nothing of a mixed cluster")


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
