"""``examples/own_loop.py`` for two devices that are described, not measured.

``own_loop_script.py FOLDER NAME ...`` runs it once for each name, with its run in ``FOLDER/NAME``. Where
``slow`` stands before the names every step takes longer, so that there is time to stop it, and every
rank notes in ``FOLDER/samples-PID`` which samples each step was trained with."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from functools import partial
from pathlib import Path

from launches import cluster_file, rank

import mixmesh
from mixmesh import checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"
NUM_SAMPLES = 2000
SLOW, SLOW_S = "slow", 0.05
RUN_OF = "the run of "  # begins what the first rank of a run prints


def note_and_ask(preemption: checkpoint.Preemption, ask=checkpoint.Preemption.is_requested) -> bool:
    """``is_requested``, which the loop asks after every step; takes a while, and notes the samples."""
    time.sleep(SLOW_S)
    loop = sys._getframe(1).f_locals
    samples = [NUMBERS[tuple(row)] for row in loop["x"].tolist()]
    row = {"step": loop["step"], "samples": samples, "at": time.time(), "rank": rank(), "pid": os.getpid()}
    with open(Path(sys.argv[1]).parent / f"samples-{os.getpid()}", "a") as file:
        file.write(json.dumps(row) + "\n")
    return ask(preemption)


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    cluster = cluster_file(Path(folder))
    mixmesh.prepare = partial(mixmesh.prepare, cluster=cluster, profile_s=0, cache=Path(folder) / "cache")
    if names[0] == SLOW:
        points = runpy.run_path(str(EXAMPLE))["points"](NUM_SAMPLES).tensors[0]
        NUMBERS = {tuple(row): number for number, row in enumerate(points.tolist())}
        checkpoint.Preemption.is_requested = note_and_ask
    for name in names:
        if name != SLOW:
            if not rank():
                print(f"{RUN_OF}{name}", flush=True)
            sys.argv[1:] = [str(Path(folder) / name)]
            runpy.run_path(str(EXAMPLE), run_name="__main__")
