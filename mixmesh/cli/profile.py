"""mixmesh profile"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..cluster import Cluster
from ..errors import InputError
from .plan import JobName
from .testbed import CLUSTER_VARIABLE


def profile(
    job: JobName,
    out: Annotated[Path, typer.Option("--out", metavar="P.json", help="Write the profile here.")],
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="C.toml", help="Inside the testbed: its own.")
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=1, metavar="SECONDS", help="Measure for so long.")
    ] = 60,
) -> None:
    """Measure a job's operators on every device, and the links: under torchrun or inside the testbed."""
    given = cluster or os.environ.get(CLUSTER_VARIABLE)
    if given is None:
        raise InputError("profile needs to know the cluster", expected="--cluster C.toml")
    described = Cluster.load(given)
    if not out.parent.is_dir():
        raise InputError("the profile cannot be written", where=str(out), got=f"no folder {out.parent}")
    rank = check_launch(job, described, given, out)
    from ..job import load_job
    from ..profiler import profile as measure
    from ..testbed import enter_device
    from ..trace import trace
    from .run import leave

    loaded = load_job(job)
    graph = trace(loaded.model, loaded.batch).graph
    found = measure(graph, loaded, described, budget_s=budget, on_start=enter_device)
    if rank == 0:
        found.save(out)
    leave()
    if rank == 0:
        skipped = found.provenance.get("skipped", [])
        print(
            f"{len(found.devices)} kinds of device and {len(found.collectives)} curves of collectives "
            f"({found.provenance['backend']}) measured, written to {out}"
        )
        if skipped:
            print(f"warning: no time was left for {', '.join(skipped)}: estimated instead")


def check_launch(job: str, cluster: Cluster, path: Path | str, out: Path) -> int:
    """This process's rank. Raises InputError, with what to type, outside of torchrun and the testbed."""
    world_size = cluster.world_size
    command = f"mixmesh profile {job} --cluster {path} --out {out}"
    if os.environ.get("WORLD_SIZE") == str(world_size) and "RANK" in os.environ:
        return int(os.environ["RANK"])
    raise InputError(
        "profiling needs one process on every device",
        expected=f"{world_size} processes, started by torchrun or the testbed",
        got=f"WORLD_SIZE={os.environ['WORLD_SIZE']}"
        if "RANK" in os.environ
        else "no RANK in the environment",
        hint=(
            f"torchrun --nproc-per-node {world_size} -m {command}",
            f"mixmesh testbed --cluster {path} -- {command}",
        ),
    )
