"""The folder of device files, which ``mixmesh calibrate`` writes: one for each kind of card, by its name."""

from __future__ import annotations

import os
import re
from pathlib import Path

VARIABLE = "MIXMESH_DEVICES"
NONE = "none"  # the variable's word for: read no device file
SUFFIX = ".toml"


def devices_folder() -> Path | None:
    """``$MIXMESH_DEVICES``, or ``mixmesh/devices`` in the user's configuration; None for ``none``."""
    folder = os.environ.get(VARIABLE)
    if folder:
        return None if folder == NONE else Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mixmesh" / "devices"


def file_name(name: str) -> str:
    """The name of the file of a device: its own, with a dash for what some file systems do not allow."""
    return re.sub(r'[/\\:*?"<>|]|^\.', "-", name) + SUFFIX


def device_file(name: str) -> Path | None:
    """The device file of this name; None if there is none."""
    folder = devices_folder()
    path = None if folder is None else folder / file_name(name)
    return path if path is not None and path.is_file() else None


def files() -> list[Path]:
    """All device files, in order of their names."""
    folder = devices_folder()
    return [] if folder is None else sorted(folder.glob(f"*{SUFFIX}"))
