"""python -m benchmarks scripts"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, seconds

from .common import Keep, Only, Out, app, case_by_case, command_line

if TYPE_CHECKING:
    from ..scripts import Result


@app.command()
def scripts(
    only: Only = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round of few steps.")] = False,
    out: Out = Path("out/bench/scripts.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """The scripts of examples/scripts against the same under DistributedDataParallel, in the testbed."""
    from ..scripts import FULL, SHORT, cases, report, run

    chosen = cases(only or ())
    made = case_by_case(
        len(chosen),
        lambda say: run(chosen, SHORT if quick else FULL, say, keep),
        shown,
        lambda results: report(results, command_line()),
        out,
        as_json,
    )
    if not made["losses_agree"]:
        raise typer.Exit(1)


def shown(result: Result) -> str:
    from ..scripts import DDP, OURS

    gain, ahead = result.speedup, result.ahead_after_steps
    lines = [
        f"{result.case}: {gain.median:.2f}x DistributedDataParallel ({gain.least:.2f} - {gain.most:.2f}), "
        f"{seconds(result.ours.median_s)} for {seconds(result.ddp.median_s)} a step",
        f"  {result.written} lines written, {result.removed} taken out; "
        f"losses off by {result.loss_error:.1e}",
        f"  the first step ends after {seconds(result.first_s[OURS][0])} with planning, and "
        f"{seconds(result.first_s[DDP][0])} under it; "
        + ("never ahead" if ahead is None else f"ahead from step {ahead} on"),
        f"  {result.plan}",
    ]
    return "\n".join(lines + [f"  {'met   ' if met else 'MISSED'}  {t}" for t, met in result.targets.items()])
