"""mixmesh testbed"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..cluster import Cluster
from .output import seconds, size, table
from .plan import ClusterFile

CLUSTER_VARIABLE = "MIXMESH_CLUSTER"  # gives commands inside the testbed the path of the cluster file


def testbed(
    cluster: ClusterFile,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Run on every device.")],
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="End all ranks after this time."),
    ] = None,
) -> None:
    """Make a mixed cluster out of this machine, and run a command on every device of it."""
    from ..measure.testbed import run

    described = Cluster.load(cluster)
    environment = {CLUSTER_VARIABLE: str(cluster.resolve())}
    result = run(described, resolve(command), env=environment, timeout_s=timeout)
    rows = [
        (str(r.rank), described.devices[r.rank].name, seconds(r.cpu_s),
         size(r.memory_peak_bytes) if r.memory_peak_bytes else "-",
         size(r.memory_limit_bytes) if r.memory_limit_bytes else "-")
        for r in result.ranks
    ]  # fmt: skip
    print(table(("rank", "device", "CPU time", "peak memory", "of"), rows), file=sys.stderr)
    print(f"mixmesh testbed: {seconds(result.time_s)}, emulation: {result.emulation}", file=sys.stderr)


def resolve(command: list[str]) -> list[str]:
    """Makes ``mixmesh ...`` in the testbed run this installation, whatever PATH is."""
    if command[0] == "mixmesh":
        return [sys.executable, "-m", "mixmesh", *command[1:]]
    return list(command)
