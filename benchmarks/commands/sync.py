"""python -m benchmarks sync"""

from __future__ import annotations

from pathlib import Path

from mixmesh.cli.output import Json

from .common import Keep, Only, Out, app
from .order import Quick, contests


@app.command()
def sync(
    only: Only = None,
    quick: Quick = False,
    out: Out = Path("out/bench/sync.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Gradients by all_reduce, to owners, by a server, and as the simulator mixes them, in the testbed."""
    from ..sync import CASES, QUICK

    contests("sync", CASES, QUICK, only, quick, out, keep, as_json)
