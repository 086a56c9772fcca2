"""Files: where mixmesh's own are, and reading one that a person names, with a bound on its size."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[1]  # the folder of mixmesh's own modules, as tracebacks name it


def read_text(path: str | Path, max_bytes: int) -> str:
    """The text of a file. Raises OSError if it cannot be read, ValueError if it is too large or not text."""
    with Path(path).open("rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
