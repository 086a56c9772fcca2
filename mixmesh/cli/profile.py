"""mixmesh profile"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..base.launched import rank_and_world_size
from ..base.progress import telling
from ..cluster import Cluster
from ..errors import InputError
from .output import Json, check_folder_of, print_json
from .plan import BatchNorm, JobName
from .testbed import CLUSTER_VARIABLE


def profile(
    job: JobName,
    out: Annotated[Path, typer.Option("--out", metavar="P.json", help="Write the profile here.")],
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="C.toml", help="Inside the testbed: its own.")
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=1, metavar="SECONDS", help="Measure for this long.")
    ] = 60,
    micro_batches: Annotated[
        bool, typer.Option("--micro-batches", help="Confirm first how many samples each device can hold.")
    ] = False,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Measure whole steps as `mixmesh run --compile` runs them.")
    ] = False,
    batch_norm: BatchNorm = "exact",
    as_json: Json = False,
) -> None:
    """Measure a job's operators on every device, and the links: under torchrun or inside the testbed."""
    described, rank = on_every_device("profile", job, cluster, out, writes="profile")
    from ..cost import CostModel
    from ..frontend.job import load_job
    from ..frontend.trace import trace
    from ..lang.ir import even_ratio
    from ..measure.profiler import profile as measure
    from ..measure.testbed import enter_device
    from ..runtime.comm import leave
    from ..search.baselines import data_parallel

    loaded = load_job(job)
    graph = trace(loaded.model, loaded.batch, batch_norm=batch_norm, outputs=loaded.outputs).graph
    even = even_ratio(described.world_size)
    program = data_parallel(graph, CostModel(described), even) if micro_batches else None
    with telling(rank, "profiling") as say:
        measured = measure(
            graph,
            loaded,
            described,
            budget_s=budget,
            program=program,
            compiles=compiles,
            on_start=enter_device,
            progress=say,
        )
    if rank == 0:
        measured.save(out)
    leave()
    if rank:
        return
    skipped = measured.provenance.get("skipped")
    if as_json:
        devices = {
            name: {
                "operators": len(d.ops),
                "step_scale": d.step_scale,
                "slowdown": d.slowdown,
                "rested_s": d.rested_s,
                "rested_speed": d.rested_speed,
                "largest_micro_batch": d.largest_micro_batch,
            }
            for name, d in measured.devices.items()
        }
        curves = len(measured.collectives)
        print_json({"out": str(out), "devices": devices, "collectives": curves, **measured.provenance})
        return
    print(
        f"{len(measured.devices)} kinds of device and {len(measured.collectives)} curves of collectives "
        f"({measured.provenance['backend']}) measured, written to {out}"
    )
    for name, d in measured.devices.items():
        if d.largest_micro_batch:
            print(f"{name}: up to {', '.join(map(str, d.largest_micro_batch))} samples in ZeRO stages 0 to 3")
    if isinstance(skipped, list) and skipped:
        print(f"warning: no time was left for {', '.join(skipped)}: estimated instead")


def on_every_device(
    command: str, job: str, cluster: Path | None, out: Path, *, writes: str
) -> tuple[Cluster, int]:
    """The cluster (of the file, or the testbed's) and this process's rank, for a command that measures and
    writes to ``out``. Raises InputError."""
    cluster_path = cluster or os.environ.get(CLUSTER_VARIABLE)
    if cluster_path is None:
        raise InputError(
            f"{command} needs to know the cluster",
            expected="--cluster C.toml, or the testbed's own",
            got="no --cluster",
            hint=(
                "torchrun --nproc-per-node N -m mixmesh detect --out C.toml, on every machine",
                f"then the same with -m mixmesh {command} {job} --cluster C.toml --out {out}",
            ),
        )
    described = Cluster.load(cluster_path)
    check_folder_of(out, f"the {writes}")
    return described, check_launch(command, job, described, cluster_path, out)


def check_launch(command: str, job: str, cluster: Cluster, path: Path | str, out: Path) -> int:
    """Returns this process's rank. Raises InputError, with a command to type, if neither torchrun nor the
    testbed started this process."""
    world_size = cluster.world_size
    line = f"mixmesh {command} {job} --cluster {path} --out {out}"
    if os.environ.get("WORLD_SIZE") == str(world_size) and "RANK" in os.environ:
        return rank_and_world_size()[0]
    raise InputError(
        f"mixmesh {command} needs one process on every device",
        expected=f"{world_size} processes, started by torchrun or the testbed",
        got=f"WORLD_SIZE={os.environ['WORLD_SIZE']}"
        if "RANK" in os.environ
        else "no RANK in the environment",
        hint=(
            f"torchrun --nproc-per-node {world_size} -m {line}",
            f"mixmesh testbed --cluster {path} -- {line}",
        ),
    )
