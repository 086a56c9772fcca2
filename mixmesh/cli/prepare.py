"""The start of ``mixmesh run`` without a plan: detect, profile, plan, and say what was decided."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..frontend.job import Job
from .output import seconds
from .profile import telling

if TYPE_CHECKING:
    from ..training.preparation import Prepared

ProfileSeconds = Annotated[
    float,
    typer.Option(
        "--profile-seconds",
        min=0,
        metavar="S",
        help="Without --plan: measure the job's operators and the links for about so long; 0 measures none.",
    ),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Where what was measured and planned is kept: $MIXMESH_CACHE, or ~/.cache/mixmesh.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh-plan", help="Measure and plan again, whatever is kept.")]


def prepared_plan(
    job: str,
    profile_s: float,
    planner: str,
    folder: Path | None,
    is_fresh: bool,
    batch_norm: str = "exact",
    cluster_file: Path | None = None,
    heartbeat_s: float = 20.0,
    compiles: bool = False,
) -> tuple[Job, Prepared, int]:
    """The job, its plan for the devices of this launch with what that rests on, and this process's rank.
    Collective. Random numbers are as the job left them, alike on all ranks."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    from ..planner import check_planner

    check_planner(planner)
    from ..cluster.detection import Cache
    from ..cluster.detection.cache import default_folder
    from ..frontend.job import load_job
    from ..training.preparation import Options, prepare_job, same_random_numbers

    with telling(rank, "preparing") as say:
        say("loading the job")
        loaded = load_job(job)
        with same_random_numbers():
            prepared = prepare_job(
                loaded,
                world_size,
                options=Options(
                    profile_s, planner, heartbeat_s=heartbeat_s, batch_norm=batch_norm, compiles=compiles
                ),
                cache=Cache(None if is_fresh else folder or default_folder()),
                cluster_file=cluster_file,
                progress=say,
            )
    if rank == 0:
        from ..explain.headline import headline

        for phase in prepared.phases:
            source = "kept from an earlier start" if phase.was_kept else seconds(phase.time_s)
            print(f"{phase.name}: {source}", file=sys.stderr)
        print(headline(prepared.plan, prepared.cluster), file=sys.stderr, flush=True)
        for warning in prepared.plan.warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    return loaded, prepared, rank
