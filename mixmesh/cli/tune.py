"""mixmesh tune"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.progress import telling
from .output import Json, print_json, seconds, table
from .plan import JobName, PlannerName, ProfileFile, summary
from .profile import on_every_device

if TYPE_CHECKING:
    from ..measure.tuning import Trial, Tuned


def tune(
    job: JobName,
    out: Annotated[Path, typer.Option("--out", metavar="X.plan", help="Write the fastest plan here.")],
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="C.toml", help="Inside the testbed: its own.")
    ] = None,
    planner: PlannerName = "auto",
    profile: ProfileFile = None,
    count: Annotated[
        int, typer.Option("--plans", min=1, help="How many plans of different kinds to try.")
    ] = 5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of every plan.")] = 2,
    as_json: Json = False,
) -> None:
    """Try the best plans on the cluster, and keep the fastest: under torchrun or inside the testbed."""
    described_cluster, rank = on_every_device("tune", job, cluster, out, writes="plan")
    from ..api import load_profile
    from ..frontend.job import load_job
    from ..measure.tuning import tune as run
    from ..planner import check_planner
    from ..runtime.comm import leave

    check_planner(planner)
    costs = load_profile(profile)
    if costs is None and not rank:
        print("mixmesh tune: without --profile plans are made from datasheets", file=sys.stderr, flush=True)
    with telling(rank, "tuning") as say:
        load = partial(load_job, job)
        tuned = run(load, described_cluster, costs, planner=planner, count=count, rounds=rounds, progress=say)
    if rank == 0:
        tuned.plan.save(out)
    leave()
    if rank:
        return
    if as_json:
        print_json({"out": str(out), **tuned_object(tuned)})
        return
    print(trials_table(tuned))
    print()
    print(summary(tuned.plan, described_cluster))
    print(f"\nwritten to {out}")


def tuned_object(tuned: Tuned) -> dict[str, Any]:
    from ..measure.tuning import kind_text, same

    return {
        "planner": tuned.plan.planner,
        "measured_step_s": tuned.plan.measured_step_s,
        "predicted_step_s": tuned.plan.predicted_step_s,
        "trials": [
            {
                "plan": kind_text(t.plan),
                "chosen": same(t.plan, tuned.plan),
                "costs": t.plan.cost_source,
                "predicted_step_s": t.plan.predicted_step_s,
                "step_s": t.step_s if t.turns_s else None,
                "turns_s": list(t.turns_s),
                "failed": t.failed or None,
            }
            for t in tuned.trials
        ],
    }


def trials_table(tuned: Tuned) -> str:
    from ..measure.tuning import kind_text, same

    def row(t: Trial) -> tuple[str, ...]:
        spread = f"{seconds(min(t.turns_s))} - {seconds(max(t.turns_s))}" if t.turns_s else "-"
        measured = t.failed or seconds(t.step_s)
        star = "*" if same(t.plan, tuned.plan) else ""
        return (
            star,
            kind_text(t.plan),
            seconds(t.plan.predicted_step_s),
            measured,
            spread,
            str(len(t.turns_s)),
        )

    return table(("", "plan", "predicted", "measured", "turns", ""), [row(t) for t in tuned.trials])
