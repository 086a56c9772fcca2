"""python -m benchmarks training"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, seconds, table

from .common import Keep, Only, Out, app, case_by_case, command_line

if TYPE_CHECKING:
    from ..training_results import RaceResult, Result, Speedup, SweepResult


@app.command()
def training(
    only: Only = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few steps, of a case of each kind or those of --only.")
    ] = False,
    out: Out = Path("out/bench/training.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Training steps of our plans against PyTorch's DDP and FSDP on mixed clusters, in the testbed."""
    from ..training import cases, run
    from ..training_cases import CASES, FULL, QUICK, SHORT
    from ..training_results import RaceResult, report

    chosen = cases(only or (), QUICK if quick and not only else CASES)
    made = case_by_case(
        len(chosen),
        lambda say: run(chosen, SHORT if quick else FULL, say, keep),
        lambda result: shown_race(result) if isinstance(result, RaceResult) else shown_sweep(result),
        lambda results: report(results, command_line()),
        out,
        as_json,
    )
    if not made["losses_agree"]:
        raise typer.Exit(1)


def shown_race(result: RaceResult) -> str:
    from ..training_results import Speedup

    rows = [
        (t.name, t.setting, seconds(t.median_s), _speedup(Speedup.of(result.ours, t)))
        for t in (
            *result.better,
            *filter(None, [result.without]),
            result.data_parallel,
            result.untuned,
            result.ours,
        )
    ]
    lines = [
        f"{result.case}: {result.speedup.median:.2f}x the best baseline ({result.best.name})",
        table(("", "setting", "a step", "ours is faster by"), rows),
        f"ours is of planner {result.planner}, predicted {seconds(result.predicted_s)}; "
        f"all devices without communication {seconds(result.measured.ideal_s)}",
    ]
    if result.tried:
        tried = [(t.plan, seconds(t.predicted_s), " ".join(map(seconds, t.turns_s))) for t in result.tried]
        lines.append(table(("tried", "predicted", "turns"), tried))
    return "\n".join(lines + _targets(result))


def shown_sweep(result: SweepResult) -> str:
    from ..training_results import EVENLY, PADDED

    medians_s = {t.name: t.median_s for t in result.timings}
    rows = []
    for count, time_s in result.ours_s.items():
        row = [str(count), seconds(time_s)]
        for kind, gains in ((PADDED, result.gains), (EVENLY, result.gains_over_even)):
            found = count in gains
            row += [seconds(medians_s[f"{count}{kind}"]), _speedup(gains[count])] if found else ["-", "-"]
        rows.append(tuple(row))
    header = (result.case.job, "a step", "padded", "ours is faster by", "padded evenly", "ours is faster by")
    lines = [
        f"{result.case}: {result.case.job}, bump of at most {result.largest_bump:.0%}",
        table(header, rows),
    ]
    return "\n".join(lines + _targets(result))


def _speedup(value: Speedup) -> str:
    return f"{value.median:.2f} ({value.least:.2f} - {value.most:.2f})"


def _targets(result: Result) -> list[str]:
    lines = [f"  {'met   ' if met else 'MISSED'}  {target}" for target, met in result.targets.items()]
    if not result.measured.losses_agree:
        worst = max(result.measured.loss_errors, key=result.measured.loss_errors.__getitem__)
        lines.append(f"  the losses of {worst} are off by {result.measured.loss_errors[worst]:.1e}")
    return lines
