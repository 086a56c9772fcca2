"""One process of the scripts in examples/scripts: runs some of them one after the other, as ``python SCRIPT``
would, with what each prints going to a file of its own.

``python -m tests.script_runs FOLDER RUNS``; ``RUNS`` is a list in JSON: [name, script, words, planner]."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import mixmesh
from benchmarks.vision import find_torchvision
from mixmesh.training.integrations import launched


def run(script: Path, arguments: list[str], planner: str, printed: Path) -> None:
    """Runs a script, whose ``mixmesh.prepare`` measures nothing and asks one planner, as does that of the
    trainers of other libraries."""
    original = mixmesh.prepare
    mixmesh.prepare = launched.prepare = partial(original, profile_s=0, planner=planner)
    sys.argv = [str(script), *arguments]
    try:
        with open(printed, "w") as file, redirect_stdout(file):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        mixmesh.prepare = launched.prepare = original
        forget_processes()


def forget_processes() -> None:
    """Accelerate keeps one state for all of a process; every script stands for a process of its own."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def main(folder: Path, runs: list[tuple[str, str, list[str], str]]) -> None:
    find_torchvision()
    for name, script, arguments, planner in runs:
        started = time.perf_counter()
        out = ["--out", str(folder / name)]
        run(Path(script), [*arguments, *out], planner, folder / f"{name}.{os.environ.get('RANK', '0')}.txt")
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
