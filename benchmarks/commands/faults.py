"""python -m benchmarks faults"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, seconds, table

from .common import Out, app, command_line, progress_bar, write_rows

if TYPE_CHECKING:
    from ..faults.bench import Trained


@app.command()
def faults(
    kills: Annotated[int, typer.Option("--kills", min=1, metavar="N", help="So many faults in all.")] = 9,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only these kinds of faults; repeat. All without it."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the kinds' order, the victims and moments.")] = 0,
    epochs: Annotated[int, typer.Option("--epochs", min=3, help="Of a training, 20 steps each.")] = 15,
    planner: Annotated[str, typer.Option("--planner", help="Of the disturbed job.")] = "ddp-proportional",
    heartbeat_s: Annotated[float, typer.Option("--heartbeat", min=1, metavar="S", help="As of run.")] = 20.0,
    limit_s: Annotated[
        float, typer.Option("--limit", min=10, metavar="S", help="After so long a training is stuck.")
    ] = 240.0,
    machines: Annotated[int, typer.Option("--machines", min=2, max=8, help="With one device each.")] = 4,
    is_plain: Annotated[
        bool, typer.Option("--plain", help="As plain processes, without what needs the testbed.")
    ] = False,
    out: Out = Path("out/bench/faults.json"),
    as_json: Json = False,
) -> None:
    """Faults at random moments of real trainings under torchrun, each beside one that is left alone."""
    from mixmesh.measure.testbed import probe

    from ..faults import job
    from ..faults.bench import Chaos, choose_kinds, report
    from ..faults.judgement import Training
    from ..faults.scene import Setting

    is_plain = is_plain or not probe().possible

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    kinds = choose_kinds(kind or (), is_plain, tell)
    training = Training(job.SAMPLES, job.BATCH_SIZE, epochs)
    setting = Setting(training, planner=planner, heartbeat_s=heartbeat_s, limit_s=limit_s)
    trainings: list[Trained] = []
    made = {}
    with progress_bar(kills) as (show, advance):

        def say(text: str) -> None:
            show(text)
            if not sys.stderr.isatty():
                tell(text)

        chaos = Chaos(kinds, kills, seed, setting, machines, is_plain, say)
        for trained in chaos.run():
            trainings.append(trained)
            for _ in trained.faults:
                advance()
            if not as_json:
                print(shown(len(trainings) - 1, trained), flush=True)
            made = report(trainings, kills, command_line(), seed)
            write_rows(made, out)  # keeps the rows so far, if a later training fails
    if as_json:
        print_json(made)
    else:
        print(summary(made, out))
    raise typer.Exit(0 if made["targets_met"] == len(made["targets"]) else 1)


def shown(number: int, trained: Trained) -> str:
    """One training, with a line for each fault and for all that is wrong."""
    name = f"training {number}" if number else "undisturbed"
    lines = [
        f"{name}: {trained.steps_made} steps made for {len(trained.losses)}, {seconds(trained.time_s)}, "
        f"losses off by {trained.loss_error:.1e}"
    ]
    for fault in trained.faults:
        times = (
            ("noticed", fault.noticed_s), ("checkpoint finished", fault.saved_s),
            ("training again", fault.again_s), ("whole", fault.whole_s),
        )  # fmt: skip
        told = ", ".join(f"{what} {time_s:.1f} s" for what, time_s in times if time_s is not None)
        lines.append(
            f"  {'ok    ' if fault.is_survived else 'FAILED'} step {fault.step}: {fault.what}: {told}"
        )
        lines += [f"         {fault.problem}"] if fault.problem else []
    lines += [f"  PROBLEM {text}" for text in (*trained.problems, *trained.unreadable)]
    return "\n".join([*lines, *trained.report.splitlines()])


def summary(made: dict, out: Path) -> str:
    """The table of kinds, and the targets that were met."""

    def cell(time_s: float | None) -> str:
        return "-" if time_s is None else f"{time_s:.1f}"

    rows = [
        (r["kind"], f"{r['survived']} of {r['made']}", *(
            cell(r[f"longest_{name}_s"]) for name in ("noticed", "saved", "again", "whole")
        ))
        for r in made["kinds"]
    ]  # fmt: skip
    head = (
        "kind", "survived", "noticed, s", "checkpoint finished, s", "training again, s", "all machines, s"
    )  # fmt: skip
    lines = [table(head, rows), f"longest times; {seconds(made['time_s'])} in all, seed {made['seed']}"]
    lines += [f"  {'met   ' if is_met else 'MISSED'}  {text}" for text, is_met in made["targets"].items()]
    return "\n".join([*lines, f"written to {out}"])
