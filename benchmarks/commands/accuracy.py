"""python -m benchmarks accuracy"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, seconds, table
from mixmesh.errors import InputError

from .common import Keep, Only, Out, app, command_line, progress_bar, write_rows

if TYPE_CHECKING:
    from ..accuracy import Case


@app.command()
def accuracy(
    only: Only = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two settings instead of all.")] = False,
    out: Out = Path("out/bench/accuracy.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Predicted against measured time and memory of several plans per job and cluster, in the testbed."""
    from ..accuracy import report, run, settings
    from ..accuracy_cases import QUICK

    if quick and only:
        raise InputError("--quick chooses the cases", expected="--quick, or --only NAME")
    chosen = QUICK if quick else settings(only or ())
    cases: list[Case] = []
    with progress_bar(len(chosen)) as (say, advance):
        for _, measured in run(chosen, progress=say, keep=keep):
            cases += measured
            advance()
    made = report(cases, command_line())
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    print(shown(cases, made))
    print(f"\nwritten to {out}")


def shown(cases: list[Case], made: dict) -> str:
    header = (
        "job", "cluster", "plan of", "predicted", "measured", "error", "drift", "peak memory", "error"
    )  # fmt: skip
    rows = [
        (
            c.job,
            c.cluster,
            ", ".join(c.planners),
            seconds(c.predicted_s),
            seconds(c.measured_s),
            f"{c.time_error:+.1%}",
            f"{c.drift:.2f}",
            " ".join(f"{b / 2**20:.0f}" for b in c.measured_bytes) + " MiB",
            " ".join(f"{e:+.1%}" for e in c.memory_errors),
        )
        for c in cases
    ]
    lines = [
        table(header, rows),
        "",
        f"{made['cases']} cases: time off by {made['time_mape']:.1%} in the mean (absolute), "
        f"Pearson {made['pearson']:.3f}, Spearman {made['spearman']:.3f}",
        f"without what the machine's own speed has changed by since the profile (drift): "
        f"{made['time_mape_without_drift']:.1%}",
        f"peak memory at most {made['memory_max_under']:.1%} under and {made['memory_max_over']:.1%} over "
        "what was measured",
        f"the plan that auto chose is slower than the fastest measured by {made['mean_regret']:.1%} in the "
        f"mean, {made['max_regret']:.1%} at most",
    ]
    if made["emulation"] != ["quota"]:
        lines.append("warning: without CPU quotas and network limits these times say nothing of it")
    return "\n".join(lines)
