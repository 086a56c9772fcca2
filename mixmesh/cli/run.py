"""mixmesh run"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..check import check_plan
from ..cluster import Cluster
from ..errors import InputError, JobError
from ..plan_file import Plan
from .output import Json, print_json, seconds, size
from .plan import JobName
from .testbed import CLUSTER_VARIABLE


def run(
    job: JobName,
    plan: Annotated[Path, typer.Option("--plan", metavar="X.plan", help="From mixmesh plan --out.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to train.")] = 10,
    as_json: Json = False,
) -> None:
    """Train a job by a plan: one process per device, under torchrun or inside the testbed."""
    loaded_plan = Plan.load(plan)
    rank = check_launch(job, plan, loaded_plan)
    from ..check import check_program
    from ..job import load_job
    from ..runtime.train import train
    from ..testbed import enter_device

    check_program(loaded_plan.program, str(plan))

    def say(number: int, loss: float, step_s: float) -> None:
        if not rank and not as_json:
            print(f"step {number + 1}  loss {loss:.5g}  {seconds(step_s)}", flush=True)

    report = train(load_job(job), loaded_plan, steps=steps, on_start=enter_device, on_step=say)
    leave()
    if rank:
        return
    if not report.step_s:
        raise JobError("the job's data has no batch", expected="at least one batch", where=job)
    median = report.step_s_median
    if as_json:
        print_json(
            {
                "step_s_median": median,
                "predicted_step_s": loaded_plan.predicted_step_s,
                "losses": list(report.losses),
                "peak_memory_bytes": list(report.peak_memory_bytes),
                "step_s": list(report.step_s),
                "world_size": loaded_plan.program.world_size,
                "emulation": os.environ.get("MIXMESH_EMULATION"),
            }
        )
        return
    predicted = loaded_plan.predicted_step_s
    print(f"{len(report.losses)} steps, loss {report.losses[0]:.5g} -> {report.losses[-1]:.5g}")
    print(f"step {seconds(median)} (median), predicted {seconds(predicted)}")
    print("peak memory " + ", ".join(size(b) if b else "-" for b in report.peak_memory_bytes))


def leave() -> None:
    """Ends together: a rank that leaves early looks lost to the others."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def check_launch(job: str, path: Path, plan: Plan) -> int:
    """This process's rank. Raises InputError, with what to type, outside of torchrun and the testbed."""
    world_size = plan.program.world_size
    if "RANK" not in os.environ:
        raise InputError(
            "this is one process, and the plan needs one for every device",
            expected=f"to be started {world_size} times, by torchrun or the testbed",
            got="no RANK in the environment",
            hint=(
                f"torchrun --nproc-per-node {world_size} -m mixmesh run {job} --plan {path}",
                f"mixmesh testbed --cluster C.toml -- mixmesh run {job} --plan {path}",
            ),
        )
    given = os.environ.get("WORLD_SIZE", "")
    if given != str(world_size):
        raise InputError(
            "the plan is for another number of processes",
            expected=f"{world_size} processes, one per device of {plan.cluster_name or 'the cluster'}",
            got=f"WORLD_SIZE={given}",
            where=str(path),
            hint=f"torchrun --nproc-per-node {world_size} -m mixmesh run {job} --plan {path}",
        )
    if CLUSTER_VARIABLE in os.environ:
        check_plan(plan, Cluster.load(os.environ[CLUSTER_VARIABLE]), where=str(path))
    return int(os.environ["RANK"])
