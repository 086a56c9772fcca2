"""python -m benchmarks collectives"""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mixmesh.base.units import size_text
from mixmesh.cli.output import Json, print_json, seconds, table

from .common import Out, app, command_line, progress_bar, write_rows
from .order import Quick

if TYPE_CHECKING:
    from ..collectives import Row


@app.command()
def collectives(
    quick: Quick = False,
    out: Out = Path("out/bench/collectives.json"),
    as_json: Json = False,
) -> None:
    """Padded, grouped and other forms of collectives over the skew of their pieces, in the testbed."""
    from ..collectives import FULL, QUICK, report, run

    with progress_bar(1) as (say, advance):
        rows, emulation = run(QUICK if quick else FULL, say)
        advance()
    made = report(rows, emulation, command_line())
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    for (name, size), found in groupby(rows, key=lambda r: (r.collective, r.size_bytes)):
        print(shown(name, size, list(found)), "\n")
    print(f"what a plan takes is {made['mean_regret'] - 1:.0%} slower than the fastest in the mean, what the")
    print(f"runtime takes without a profile {made['mean_default_regret'] - 1:.0%}; written to {out}")
    if emulation != "quota":
        print("warning: without CPU quotas and network limits these times say nothing of a mixed cluster")


def shown(name: str, size: int, rows: list[Row]) -> str:
    from ..collectives import GROUPED, crossing

    forms = list(rows[0].seconds)
    lines = [f"{name} of {size_text(size)}"]
    lines.append(
        table(
            ("skew", *(form or "splits" for form in forms), "the plan's", "the default"),
            [
                (f"{r.skew:g}", *(seconds(r.seconds[form]) for form in forms), r.planned, r.default)
                for r in rows
            ],
        )
    )
    if name in GROUPED:
        at = crossing(rows)
        always = at is not None and math.isinf(at)
        where = "at no skew" if at is None else "at every skew" if always else f"up to a skew of {at:.2f}"
        lines.append(f"padding is faster than {GROUPED[name]} {where}")
    return "\n".join(lines)
