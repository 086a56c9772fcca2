"""mixmesh simulate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..api import simulate as simulate_plan
from ..base.timeline import save_trace, to_chrome_trace
from ..cluster import Cluster
from ..lang.check import check_loaded, check_plan
from ..lang.plan_file import Plan
from .output import Json, check_folder_of, print_json, seconds, size, table
from .plan import ClusterFile, ProfileFile
from .show import PlanFile


def simulate(
    plan: PlanFile,
    cluster: ClusterFile,
    profile: ProfileFile = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="T.json", help="Write the timeline for ui.perfetto.dev."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the time and memory of a plan, edited by hand or not."""
    loaded, described = Plan.load(plan), Cluster.load(cluster)
    check_plan(loaded, described, where=str(plan))
    check_loaded(loaded, str(plan))
    check_folder_of(trace, "the timeline")
    timeline = simulate_plan(loaded, described, profile=profile, events=trace is not None)
    if trace is not None:
        devices = [device.name for device in described.devices]
        save_trace(to_chrome_trace(timeline, name="predicted", devices=devices), trace)
    if as_json:
        print_json(
            {
                "predicted_step_s": timeline.step_s,
                "predicted_peak_memory_bytes": list(timeline.peak_memory_bytes),
                "compute_s": list(timeline.compute_s),
                "communication_s": timeline.communication_s,
            }
        )
        return
    print(f"predicted step {seconds(timeline.step_s)}, communication {seconds(timeline.communication_s)}")
    rows = [
        (str(rank), device.name, seconds(timeline.compute_s[rank]), size(timeline.peak_memory_bytes[rank]),
         size(device.memory_bytes))
        for rank, device in enumerate(described.devices)
    ]  # fmt: skip
    print(table(("rank", "device", "computes", "memory", "of"), rows))
