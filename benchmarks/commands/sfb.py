"""python -m benchmarks sfb"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mixmesh.cli.output import Json, seconds, table

from .common import Keep, Out, app, case_by_case, command_line
from .order import Quick

if TYPE_CHECKING:
    from ..sfb import CrossingResult


@app.command()
def sfb(
    quick: Quick = False,
    out: Out = Path("out/bench/sfb.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """From which batch on gathering a gradient's factors is slower than summing it, in the testbed."""
    from ..contest import report
    from ..measure import each_case
    from ..sfb import CASES, QUICK, find
    from ..training_cases import FULL, SHORT

    chosen, effort = (QUICK, SHORT) if quick else (CASES, FULL)
    case_by_case(
        len(chosen),
        lambda say: each_case(chosen, keep, lambda crossing, folder: find(crossing, effort, folder, say)),
        shown,
        lambda results: report("sfb", results, command_line()),
        out,
        as_json,
    )


def shown(result: CrossingResult) -> str:
    rows = [(str(n), seconds(a), seconds(b), f"{a / b:.2f}") for n, (a, b) in result.step_s.items()]
    lines = [
        str(result.crossing),
        table(("rows", "summed", "factors", "factors are faster by"), rows),
        f"equally fast at {result.measured_rows:.0f} rows; by the formula {result.formula_rows:.0f} "
        f"({result.error:+.0%}), at the wire's rate {result.wire_rows:.0f}",
    ]
    lines += [f"  {'met   ' if met else 'MISSED'}  {target}" for target, met in result.targets.items()]
    return "\n".join(lines)
