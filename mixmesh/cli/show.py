"""mixmesh show, mixmesh diff"""

from __future__ import annotations

import difflib
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from ..cost.micro_steps import costed_micro_step
from ..lang.check import check_loaded
from ..lang.ir import Ratio, print_program, samples_of
from ..lang.plan_file import Plan, accumulates
from ..step import print_step
from .output import seconds, size
from .plan import summary

PlanFile = Annotated[Path, typer.Argument(metavar="X.plan", help="A plan.")]


def show(
    plan: PlanFile,
    step: Annotated[bool, typer.Option("--step", help="Print the events of a step instead.")] = False,
) -> None:
    """Print a plan: its program, as it stands in the file, and what it is predicted to cost; with --step,
    what all ranks do in a step, in order."""
    loaded = Plan.load(plan)
    check_loaded(loaded, str(plan))
    if step:
        print(_step_text(loaded))
        return
    lines = loaded.text.split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith("program "))
    print("\n".join(lines[start:]))
    print(summary(loaded))


def _step_text(plan: Plan) -> str:
    """The events of a step, or of one micro-batch of it."""
    if not accumulates(plan.micro_batches):
        return print_step(plan.program)
    micro_batch = costed_micro_step(plan.program, samples_of(plan.program))
    return "each micro-batch; gradients are reduced in the last one\n" + print_step(micro_batch, plan.program)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A.plan")], b: Annotated[Path, typer.Argument(metavar="B.plan")]
) -> None:
    """Compare two plans: the lines of their programs, their ratios and predictions."""
    one, two = Plan.load(a), Plan.load(b)
    before, after = (print_program(p.program).splitlines() for p in (one, two))
    changed = list(difflib.unified_diff(before, after, str(a), str(b), n=1, lineterm=""))
    print("\n".join(changed) if changed else "the programs are the same")
    print()
    print("\n".join(changes(one, two)) or "ratios and predictions are the same")


def changes(a: Plan, b: Plan) -> list[str]:
    """A line for each ratio and prediction that differs."""
    pairs = [
        ("planner", a.planner, b.planner),
        (
            "cluster",
            f"{a.cluster_name} ({a.cluster_fingerprint})",
            f"{b.cluster_name} ({b.cluster_fingerprint})",
        ),
        ("model", a.graph_fingerprint, b.graph_fingerprint),
    ]
    ratios = {**a.program.ratio_of, **b.program.ratio_of}
    pairs += [
        (f"ratio {n}", _shares(a.program.ratio_of.get(n)), _shares(b.program.ratio_of.get(n))) for n in ratios
    ]
    pairs += [
        ("micro-batches", _micro_batches(a), _micro_batches(b)),
        ("predicted step", seconds(a.predicted_step_s), seconds(b.predicted_step_s)),
        ("predicted memory", _sizes(a), _sizes(b)),
    ]
    out = [f"{name:<17} {x}  ->  {y}" for name, x, y in pairs if x != y]
    if 0 < a.predicted_step_s < inf and a.predicted_step_s != b.predicted_step_s:
        out.append(f"{'step':<17} {b.predicted_step_s / a.predicted_step_s:.3f} of the first")
    return out


def _shares(ratio: Ratio | None) -> str:
    return " ".join(f"{share:.4g}" for share in ratio) if ratio else "none"


def _micro_batches(plan: Plan) -> str:
    """For each rank, micro-batches x samples, and the samples of the last."""
    return ", ".join(f"{m.steps} x {m.micro_batch}, {m.last}" for m in plan.micro_batches or ()) or "none"


def _sizes(plan: Plan) -> str:
    return ", ".join(map(size, plan.predicted_peak_memory_bytes))
