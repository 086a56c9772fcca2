"""``python -m benchmarks NAME``: the project's own comparisons."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from benchmarks.commands import app
from mixmesh.__main__ import execute
from mixmesh.cluster.devices_folder import NONE, VARIABLE

PROGRAM = "python -m benchmarks"


def run(arguments: Sequence[str]) -> int:
    """Runs one comparison and passes on its errors."""
    return typer.main.get_group(app)(args=list(arguments), prog_name=PROGRAM, standalone_mode=False) or 0


if __name__ == "__main__":
    # tables use the catalogue, not calibrations of this machine
    os.environ.setdefault(VARIABLE, NONE)
    sys.exit(execute(sys.argv[1:], run))
