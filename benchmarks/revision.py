"""The revision of the code that made a table, so that the table can be made again."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def revision() -> str:
    """The commit of the checkout that runs, with "-dirty" after changes that are not committed; the package's
    version outside of a checkout."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
        return found.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        return f"version {version('mixmesh')}"
    except PackageNotFoundError:
        return "unknown"
