"""mixmesh verify"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cluster import Cluster
from ..errors import InputError
from ..lang.check import check_plan
from ..lang.plan_file import Plan
from .output import Json, print_json, working
from .plan import BatchNorm, JobName, PlannerName, PlanOptions, ProfileFile, plan_job

if TYPE_CHECKING:
    from ..frontend.trace import Traced


def verify(
    job: JobName,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="C.toml", help="Plan for this cluster, and verify that."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="X.plan", help="Verify this plan, edited or not.")
    ] = None,
    planner: PlannerName = "auto",
    profile: ProfileFile = None,
    batch_norm: BatchNorm = "exact",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Compare the losses of this many steps.")] = 1,
    as_json: Json = False,
) -> None:
    """Run all ranks of a plan in one process and compare with the single device."""
    traced: Traced | None = None
    if plan is not None:
        check_only_plans(
            plan,
            {
                "--planner": planner != "auto",
                "--profile": profile is not None,
                "--batch-norm": batch_norm != "exact",
            },
        )
        verified_plan = Plan.load(plan)
        if cluster is not None:
            check_plan(verified_plan, Cluster.load(cluster), where=str(plan))
        from ..frontend.job import load_job

        loaded = load_job(job)
    elif cluster is not None:
        options = PlanOptions(planner, profile, batch_norm=batch_norm)
        loaded, traced, verified_plan = plan_job(job, Cluster.load(cluster), options)
    else:
        raise InputError(
            "verify needs a cluster or a plan",
            expected="--cluster C.toml, or --plan X.plan",
            got="neither",
            hint=f"mixmesh verify {job} --cluster C.toml",
        )
    with working("verifying") as say:
        from ..measure.verification import verify as run

        report = run(
            loaded.model,
            loaded.batch,
            verified_plan,
            steps=steps,
            optimizer=loaded.optimizer,
            traced=traced,
            where=str(plan or ""),
            progress=say,
        )
    if as_json:
        print_json({**dataclasses.asdict(report), "planner": verified_plan.planner})
    else:
        print(f"{verified_plan.planner} on {report.world_size} ranks against the model on one device")
        print(
            f"  loss       {report.max_loss_error_f64:.1e}   in its own precision {report.max_loss_error:.1e}"
        )
        print(
            f"  gradients  {report.max_gradient_error_f64:.1e}   in its own precision "
            f"{report.max_gradient_error:.1e}"
        )
        print(f"  optimizer  {report.max_update_error:.1e}")
        if report.worst:
            print(f"  worst      {report.worst}")
        if report.differs_in:
            print(f"  differs in the {report.differs_in}")
        if verified_plan.batch_norm == "local":
            print(
                "batch norm takes each rank's own samples: compared with one device that normalises these "
                "apart, which differs from the whole batch"
            )
        for op in report.unsupported_ops:
            print(f"warning: no sharding rule for {op}; it runs replicated")
        print("equal" if report.ok else "DIFFERENT")
    if not report.ok:
        raise typer.Exit(1)


def check_only_plans(plan: Path, given: Mapping[str, bool]) -> None:
    """Raises InputError if any option that says how to plan was ``given`` with a plan."""
    useless = [option for option, is_given in given.items() if is_given]
    if useless:
        raise InputError(
            f"{', '.join(useless)}: the plan is already made",
            expected="these options with --cluster, which makes a plan, or --plan alone",
            got=f"--plan {plan} with {', '.join(useless)}",
            hint=f"mixmesh verify JOB --plan {plan}",
        )
