"""python -m benchmarks poplar"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, seconds, table

from .common import Keep, Only, Out, app, case_by_case, command_line

if TYPE_CHECKING:
    from ..poplar_results import FirstStep, MeasuredResult, Result, SimulatedResult


@app.command()
def poplar(
    only: Only = None,
    quick: Annotated[bool, typer.Option("--quick", help="One cluster measured, one simulated.")] = False,
    out: Out = Path("out/bench/poplar.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """ZeRO on unequal devices against equal and proportional parts, DDP, FSDP and the fast half alone."""
    from ..poplar import CASES, QUICK, cases, run
    from ..poplar_cases import FULL, SHORT
    from ..poplar_results import report

    chosen = cases(only or (), QUICK if quick else CASES)
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
    from ..poplar_results import FirstStep, MeasuredResult

    if isinstance(result, MeasuredResult):
        lines = shown_measured(result)
    elif isinstance(result, FirstStep):
        lines = shown_first_step(result)
    else:
        lines = shown_simulated(result)
    marks = [f"  {'met   ' if met else 'MISSED'}  {target}" for target, met in result.targets.items()]
    return "\n".join(lines + marks)


def shown_measured(result: MeasuredResult) -> list[str]:
    rows = []
    for run in result.runs:
        predicted = _mib(run.variant.predicted_bytes) if run.variant.predicted_bytes else "-"
        if run.ran:
            time = f"{run.median_s:.3f} ({min(run.rounds_s):.3f} - {max(run.rounds_s):.3f})"
            peak = _mib(run.peak_bytes)
        else:
            time, peak = "out of memory", "rank " + ", ".join(map(str, run.out_of_memory))
        promised = "-" if run.variant.predicted_s is None else f"{run.variant.predicted_s:.3f}"
        rows.append((str(run.variant), time, promised, peak, predicted))
    limits = _mib(result.limit_bytes)
    return [
        f"{result.case}: {result.case.job}, memory limits {limits} MiB",
        table(("", "s per step", "predicted", "MiB at the peak, by rank", "predicted"), rows),
    ]


def shown_simulated(result: SimulatedResult) -> list[str]:
    stages = sorted({v.stage for v in result.variants if v.stage is not None})
    names = list(dict.fromkeys((v.name, v.setting) for v in result.variants))
    rows = []
    for stage in stages:
        cells = [str(stage)]
        for name, setting in names:
            v = next(
                (v for v in result.variants if (v.name, v.setting, v.stage) == (name, setting, stage)), None
            )
            cells.append("-" if v is None else f"{v.predicted_s:.2f}" if v.fits else "does not fit")
        rows.append(tuple(cells))
    ratios = [
        f"{s:.2f}x {name}" for name in ("equal", "proportional", "fast half") if (s := result.speedup(name))
    ]
    return [
        f"{result.case}, simulated, seconds per step: {', '.join(ratios)}",
        table(("stage", *(", ".join(filter(None, n)) for n in names)), rows),
        f"planned in {seconds(result.planning_s)}",
    ]


def shown_first_step(result: FirstStep) -> list[str]:
    return [
        f"first training step after {result.total_s:.0f} s: profile {result.profile_s:.0f} s, "
        f"plan {result.plan_s:.0f} s, run {result.run_s:.0f} s"
    ]


def _mib(sizes: tuple[int, ...]) -> str:
    return " ".join(f"{size / 2**20:.0f}" for size in sizes)
