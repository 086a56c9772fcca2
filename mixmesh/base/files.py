"""File access: the folder of mixmesh's own modules, bounded reads, and writes that never leave a partial
file."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

PACKAGE = Path(__file__).absolute().parents[1]  # the folder of mixmesh's own modules, as tracebacks name it
TAIL_BYTES = 2**16  # read at a time from the end of a file


def read_text(path: str | Path, max_bytes: int) -> str:
    """Returns the text of a file, without the byte order mark that some editors put at its beginning. Raises
    OSError if it cannot be read, ValueError if it is too large or not text."""
    with Path(path).open("rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_file(path: Path) -> bool:
    """Whether there is such a file. Unlike ``Path.is_file`` it is False too for a path that is too long, or
    in a folder that this user may not look into."""
    try:
        return path.is_file()
    except OSError:
        return False


def home() -> Path:
    """The user's home folder. For a user without one, as in a container that runs under a number, it is the
    root, as ``login`` has it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.sep)


def absolute(path: str) -> str:
    """``os.path.abspath``; a relative path stays as it is if the working directory was removed."""
    try:
        return os.path.abspath(path)
    except OSError:
        return path


def working_folder() -> str:
    """The path of the working directory, which ends with a separator; empty if it was removed."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""


def merge_mark(text: str) -> tuple[int, str] | None:
    """Returns the first line, with its number, that git wrote where two versions of a text differ and nobody
    has chosen yet; None without one."""
    match = re.search(r"^(?:<{7}|>{7})(?: .*)?$", text, re.MULTILINE)
    return None if match is None else (text.count("\n", 0, match.start()) + 1, match[0])


def first_problem(path: str | Path, error: ValidationError) -> tuple[str, str]:
    """Returns the place of the first problem that a validation has found in a file, and what is wrong
    there."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{path}: {place}" if place else str(path), first["msg"]


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A context that provides a path to write to, which becomes ``path`` at the end; on failure the existing
    file stays. If ``path`` is a link, the file that it points to is replaced; a device such as ``/dev/null``,
    or a pipe, is written to directly. Raises OSError."""
    if path.is_char_device() or path.is_fifo():
        yield path
        return
    path = path.resolve()
    # processes of two machines that share the folder may have the same number, as in containers
    partial = path.with_name(f"{path.name}.partial{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def drop_cut_off_line(path: Path) -> None:
    """Removes what follows the last end of a line in a file, as a full disk or a crash leaves it: what is
    added later would be joined to it. Anything but a file stays as it is, and so does one that cannot be
    changed."""
    if not is_file(path):
        return
    with suppress(OSError), path.open("r+b") as file:
        end = begin = file.seek(0, os.SEEK_END)
        tail = b""
        while begin and b"\n" not in tail:
            begin = max(begin - TAIL_BYTES, 0)
            file.seek(begin)
            tail = file.read(TAIL_BYTES)
        kept = begin + tail.rfind(b"\n") + 1
        if kept != end:
            file.truncate(kept)


def write_text(path: str | Path, text: str) -> None:
    """Writes a file completely or not at all. Raises OSError."""
    with written_whole(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


def write_to_disk(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Writes a new file and waits until it is on the disk. Each block is released before the next one is
    requested. Raises OSError."""
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
            del block
        file.flush()
        os.fsync(file.fileno())
