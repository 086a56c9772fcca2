"""Files: the folder of mixmesh's own modules, and a bounded read of a file that a person names."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[1]  # the folder of mixmesh's own modules, as tracebacks name it


def read_text(path: str | Path, max_bytes: int) -> str:
    """Returns the text of a file. Raises OSError if it cannot be read, ValueError if it is too large or no
    text."""
    with Path(path).open("rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes a file completely or not at all. Raises OSError."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
