"""mixmesh bench sfb"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..output import Json, print_json, seconds, table
from .common import Keep, Out, app, command_line, progress_bar, write_rows
from .order import Quick

if TYPE_CHECKING:
    from ...bench.sfb import CrossingResult


@app.command()
def sfb(
    quick: Quick = False,
    out: Out = Path("out/bench/sfb.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """From which batch on gathering a gradient's factors is slower than summing it, in the testbed."""
    from ...bench.contest import report
    from ...bench.measure import case_folder
    from ...bench.sfb import CASES, QUICK, find
    from ...bench.training_cases import FULL, SHORT

    chosen = QUICK if quick else CASES
    results: list[CrossingResult] = []
    with progress_bar(len(chosen)) as (say, advance):
        for crossing in chosen:
            with case_folder(keep, str(crossing)) as folder:
                results.append(find(crossing, SHORT if quick else FULL, folder, say))
            advance()
            if not as_json:
                print(shown(results[-1]), "\n")
                sys.stdout.flush()
            write_rows(report("sfb", results, command_line()), out)
    made = report("sfb", results, command_line())
    if as_json:
        print_json(made)
    else:
        print(f"{made['targets_met']} of {made['targets']} targets met; written to {out}")


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
