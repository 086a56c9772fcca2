"""python -m benchmarks checkpoints"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, seconds, size

from .common import Keep, Only, Out, app, case_by_case, command_line

if TYPE_CHECKING:
    from ..checkpoints import Result


@app.command()
def checkpoints(
    only: Only = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds.")] = False,
    out: Out = Path("out/bench/checkpoints.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """How much of the throughput a checkpoint in 50 steps costs, in the testbed."""
    from ..checkpoints import FULL, SHORT, cases, run
    from ..contest import report

    chosen = cases(only or ())
    case_by_case(
        len(chosen),
        lambda say: run(chosen, SHORT if quick else FULL, say, keep),
        shown,
        lambda results: report("checkpoints", results, command_line()),
        out,
        as_json,
    )


def shown(result: Result) -> str:
    from ..checkpoints import ASYNC, EVERY_STEPS, NONE, WAITED

    step_s = result.blocks[NONE].median_s / EVERY_STEPS
    lines = [f"{result.case}: {seconds(step_s)} a step, checkpoints of {size(result.state_bytes)}"]
    for name in (ASYNC, WAITED):
        cost = result.cost(name)
        lines.append(f"  {name}: {cost.median:.1%} of throughput ({cost.least:.1%} to {cost.most:.1%})")
    lines.append(f"  held up by copies for {seconds(max(result.staging_s))} at most")
    return "\n".join(lines + [f"  {'met   ' if met else 'MISSED'}  {t}" for t, met in result.targets.items()])
