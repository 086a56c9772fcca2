"""mixmesh simulate"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ..api import simulate as simulate_plan
from ..check import check_placements
from ..cluster import Cluster
from ..errors import InputError
from ..plan_file import Plan
from ..simulator import Timeline
from .output import Json, print_json, seconds, size, table
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
    check_placements(loaded.program, str(plan))
    timeline = simulate_plan(loaded, described, profile=profile, events=trace is not None)
    if trace is not None:
        write_trace(timeline, described, trace)
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


def write_trace(timeline: Timeline, cluster: Cluster, path: Path) -> None:
    """The Chrome trace format, in microseconds: a process per rank, a thread per stream."""
    events = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({device.name})"}}
        for rank, device in enumerate(cluster.devices)
    ]
    events += [
        {"ph": "X", "name": e.name, "pid": e.rank, "tid": e.stream,
         "ts": e.start_s * 1e6, "dur": (e.end_s - e.start_s) * 1e6}
        for e in timeline.events
    ]  # fmt: skip
    partial = path.with_name(f"{path.name}.partial{os.getpid()}")
    try:
        partial.write_text(json.dumps({"traceEvents": events}))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write the timeline: {error.strerror}", where=str(path)) from None
