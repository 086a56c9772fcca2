"""python -m benchmarks drift"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, seconds

from .common import Keep, Only, Out, app, case_by_case, command_line

if TYPE_CHECKING:
    from ..drift import Recovery, Result


@app.command()
def drift(
    only: Only = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round.")] = False,
    out: Out = Path("out/bench/drift.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """How soon throughput is near the best again after a device's speed was halved or doubled, in the
    testbed."""
    from ..contest import report
    from ..drift import FULL, SHORT, cases, check_testbed, run

    check_testbed()
    chosen = cases(only or ())
    case_by_case(
        len(chosen),
        lambda say: run(chosen, SHORT if quick else FULL, say, keep),
        shown,
        lambda results: report("drift", results, command_line()),
        out,
        as_json,
    )


def shown(result: Result) -> str:
    lines = [f"{result.case}:"]
    for change, found in result.recoveries.items():
        of = {name: seconds(median(getattr(r, name) for r in found)) for name in TIMES}
        lines.append(
            f"  {change}: a step took {of['before_s']} before, {of['unbalanced_s']} after it and "
            f"{of['balanced_s']} with other shares; optimum {of['optimum_s']}; near it after {near(found)}"
        )
    return "\n".join(lines + [f"  {'met   ' if met else 'MISSED'}  {t}" for t, met in result.targets.items()])


TIMES = ("before_s", "unbalanced_s", "balanced_s", "optimum_s")


def near(found: tuple[Recovery, ...]) -> str:
    """The steps and seconds of each round."""
    return ", ".join("never" if r.steps is None else f"{r.steps} steps ({r.time_s:.3g} s)" for r in found)
