"""The folder of device files, which ``mixmesh calibrate`` writes: one for each kind of card, by its name."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ..base.files import home, is_file
from .catalogue import rows_named

VARIABLE = "MIXMESH_DEVICES"
NONE = "none"  # value of the variable that turns device files off
SUFFIX = ".toml"
LONGEST_BYTES = 120  # longest name used unchanged as the file name: file systems allow 255


def devices_folder() -> Path | None:
    """``$MIXMESH_DEVICES``, or ``mixmesh/devices`` in the user's configuration; None if the variable is
    ``none``."""
    folder = os.environ.get(VARIABLE)
    if folder:
        return None if folder == NONE else Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "mixmesh" / "devices"


def file_name(name: str) -> str:
    """The name of a device's file: the device's own, with a dash for each character that some file systems do
    not allow. A very long one is cut short, and a digest of the whole name stands for the rest."""
    allowed = re.sub(r'[\x00-\x1f/\\:*?"<>|]|^\.', "-", name)
    whole = allowed.encode()
    if len(whole) <= LONGEST_BYTES:
        return allowed + SUFFIX
    kept = whole[:LONGEST_BYTES].decode(errors="ignore")
    return f"{kept}-{hashlib.sha256(name.encode()).hexdigest()[:16]}{SUFFIX}"


def device_file(name: str) -> Path | None:
    """The device file of this name; None if there is none."""
    folder = devices_folder()
    path = None if folder is None else folder / file_name(name)
    return path if path is not None and is_file(path) else None


def names_meant(name: str) -> tuple[str, ...]:
    """The full names of the devices that ``name`` may mean: itself, if a device file has it, or else those of
    cards in the catalogue."""
    return (name,) if device_file(name) is not None else tuple(row.name for row in rows_named(name))


def files() -> list[Path]:
    """All device files, in order of their names."""
    folder = devices_folder()
    return [] if folder is None else sorted(folder.glob(f"*{SUFFIX}"))
