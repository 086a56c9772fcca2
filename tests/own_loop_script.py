"""``examples/own_loop.py`` for two devices that are described, not measured.

``own_loop_script.py FOLDER NAME ...`` runs it once for each name, with its run in ``FOLDER/NAME``. Where
``slow`` stands before the names every step takes longer, so that there is time to stop it."""

from __future__ import annotations

import runpy
import sys
import time
from functools import partial
from pathlib import Path

from launches import cluster_file, rank

import mixmesh
from mixmesh import checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"
SLOW, SLOW_S = "slow", 0.05
RUN_OF = "the run of "  # begins what the first rank of a run prints


def wait_and_ask(preemption: checkpoint.Preemption, ask=checkpoint.Preemption.is_requested) -> bool:
    """``is_requested``, after a while."""
    time.sleep(SLOW_S)
    return ask(preemption)


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    cluster = cluster_file(Path(folder))
    mixmesh.prepare = partial(mixmesh.prepare, cluster=cluster, profile_s=0, cache=Path(folder) / "cache")
    if names[0] == SLOW:
        checkpoint.Preemption.is_requested = wait_and_ask
    for name in names:
        if name != SLOW:
            if not rank():
                print(f"{RUN_OF}{name}", flush=True)
            sys.argv[1:] = [str(Path(folder) / name)]
            runpy.run_path(str(EXAMPLE), run_name="__main__")
