"""python -m benchmarks pipeline"""

from __future__ import annotations

from pathlib import Path

from mixmesh.cli.output import Json

from .common import Keep, Only, Out, app
from .order import Quick, contests


@app.command()
def pipeline(
    only: Only = None,
    quick: Quick = False,
    out: Out = Path("out/bench/pipeline.json"),
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Model parallelism in micro-batches against the same without, and data parallelism, in the testbed."""
    from ..pipeline import CASES, QUICK

    contests("pipeline", CASES, QUICK, only, quick, out, keep, as_json)
