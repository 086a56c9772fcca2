"""The cache of results from earlier starts: the detected cluster, profiles and plans, by fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...base.files import home, is_file, written_whole
from ...base.progress import warn_once
from ...errors import MixmeshError

T = TypeVar("T")
VARIABLE = "MIXMESH_CACHE"


def default_folder() -> Path:
    """``$MIXMESH_CACHE``, or ``mixmesh`` in the user's cache folder."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "mixmesh"


def key_of(*parts: object) -> str:
    """16 hex digits that identify all ``parts``, each taken as text."""
    text = "\0".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cache:
    """A folder of files; with ``folder`` None nothing is kept. A folder that cannot be written, or a file
    that cannot be read, is no error: the next start measures again. The former is warned about once."""

    folder: Path | None

    def load(self, name: str, read: Callable[[Path], T]) -> T | None:
        """The value in a file, read by ``read``; None if there is no such file or it is damaged."""
        path = None if self.folder is None else self.folder / name
        if path is None or not is_file(path):
            return None
        with suppress(MixmeshError, OSError):
            return read(path)
        return None

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder of the cache."""
        if self.folder is None:
            return []
        with suppress(OSError):
            return sorted(os.listdir(self.folder / folder))
        return []

    def save(self, name: str, write: Callable[[Path], object]) -> None:
        """Makes ``write`` write a file, completely or not at all."""
        if self.folder is None:
            return
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as partial:
                write(partial)
        except (MixmeshError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
            warn_once(
                f"nothing can be kept in {self.folder} ({reason}), and the next start will measure and plan "
                f"again; set {VARIABLE} to a folder that may be written to"
            )
