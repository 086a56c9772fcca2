"""The start of ``mixmesh run`` without a plan: detects, profiles, plans, and prints the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.launched import is_launched, rank_and_world_size
from ..frontend.job import Job
from ..lang.plan_file import Plan

if TYPE_CHECKING:
    from ..training.preparation import Options, Prepared

ProfileSeconds = Annotated[
    float,
    typer.Option(
        "--profile-seconds",
        min=0,
        metavar="S",
        help="Without --plan: measure operators and links for about this long; 0 measures nothing.",
    ),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Where measurements and plans are kept: $MIXMESH_CACHE, or ~/.cache/mixmesh.",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh-plan", help="Measure and plan again, even if results are kept.")
]


@dataclass(frozen=True)
class Preparing:
    """The options of a start without a plan; ``folder`` is the cache's."""

    profile_s: float
    planner: str
    folder: Path | None
    is_fresh: bool
    batch_norm: str
    cluster_file: Path | None
    heartbeat_s: float
    timeout_s: float
    compiles: bool = False

    def options(self) -> Options:
        from ..training.preparation import Options

        return Options(
            self.profile_s,
            self.planner,
            timeout_s=self.timeout_s,
            heartbeat_s=self.heartbeat_s,
            batch_norm=self.batch_norm,
            compiles=self.compiles,
        )


def check_data(job: Job, num_steps: int | None, plan: Plan) -> None:
    """Raises InputError if a run of ``num_steps``, or of whole epochs if that is None, would come to a last
    batch of the job's data that is too small for the ``plan``."""
    from ..training.preparation.refusals import check_last_batch

    hint = (
        "DataLoader(..., drop_last=True) in the job",
        "--planner ddp-tuned, which takes batches of any size",
    )
    check_last_batch(job.data, plan, num_batches=num_steps, hint=hint)


def prepared_plan(job: str, preparing: Preparing, num_steps: int | None) -> tuple[Job, Prepared, int]:
    """Loads a job and plans it for ``num_steps`` on the devices of this launch; None stands for whole epochs.
    Returns both with this process's rank. Collective. Random numbers stay as the job left them, equal on all
    ranks."""
    rank, world_size = rank_and_world_size() if is_launched() else (0, 1)
    from ..planner import check_planner

    check_planner(preparing.planner)
    from ..cluster.detection import Cache
    from ..cluster.detection.cache import default_folder
    from ..frontend.job import load_job
    from ..training.preparation import prepare_job, same_random_numbers

    loaded = load_job(job)
    with same_random_numbers():
        prepared = prepare_job(
            loaded,
            world_size,
            options=preparing.options(),
            cache=Cache(None if preparing.is_fresh else preparing.folder or default_folder()),
            cluster_file=preparing.cluster_file,
            check=partial(check_data, loaded, num_steps),
        )
    return loaded, prepared, rank
