"""mixmesh bench: passes its arguments on to ``python -m benchmarks``, in the folder beside the package."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError

NAME = "benchmarks"
# all arguments are for the comparison, --help too
SETTINGS = {"ignore_unknown_options": True, "help_option_names": []}


def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME [OPTIONS]", help="The arguments of python -m benchmarks."),
    ] = None,
) -> int:
    """The project's own comparisons: the same as python -m benchmarks, in a checkout of the repository.

    They are not installed with the package.
    """
    root = find_root()
    if root is None:
        raise InputError(
            "the comparisons are no part of the installed package",
            expected=f"a checkout of the repository, with its folder {NAME}/",
            got=f"no such folder in {Path.cwd()}, nor beside the package",
            hint=" ".join(["cd CHECKOUT && python -m", NAME, *(arguments or ["--help"])]),
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    # also for the processes that a comparison starts
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, folders)])
    return importlib.import_module(f"{NAME}.__main__").run(arguments or ["--help"])


def find_root() -> Path | None:
    """The folder that contains the comparisons: the current one, or the package's; None if neither does."""
    folders = (Path.cwd(), Path(__file__).resolve().parents[2])
    return next((f for f in folders if (f / NAME / "commands" / "common.py").is_file()), None)
