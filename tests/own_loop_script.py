"""``examples/own_loop.py`` for two devices that are described, not measured, with its run in a folder.

``own_loop_script.py FOLDER slow`` has every step take longer, so that there is time to stop it."""

from __future__ import annotations

import runpy
import sys
import time
from functools import partial
from pathlib import Path

from launches import cluster_file

import mixmesh
from mixmesh import checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"
SLOW_S = 0.05


def wait_and_ask(preemption: checkpoint.Preemption, ask=checkpoint.Preemption.is_requested) -> bool:
    """``is_requested``, after a while."""
    time.sleep(SLOW_S)
    return ask(preemption)


if __name__ == "__main__":
    folder, *options = sys.argv[1:]
    cluster = cluster_file(Path(folder))
    mixmesh.prepare = partial(mixmesh.prepare, cluster=cluster, profile_s=0, cache=Path(folder) / "cache")
    if options:
        checkpoint.Preemption.is_requested = wait_and_ask
    sys.argv[1:] = [str(Path(folder) / "run")]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
