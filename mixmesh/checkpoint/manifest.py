"""The manifest of a checkpoint: its contents with sizes and checksums, and the place of each piece of a
tensor.

A checkpoint is a folder ``000007-step-300``: the seventh that was written, after step 300. It holds one
safetensors file per rank, the plan, and ``manifest.json``. It is written next to it as ``.unfinished-...``
and renamed when all of it is on the disk, so a folder with the final name was whole once; ``check_files``
tells whether it still is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..errors import InputError

FORMAT = 2  # 1 had other checksums
SCHEDULER_CLASS = "scheduler_class"  # name of a plain value; earlier checkpoints have none
MANIFEST, PLAN = "manifest.json", "run.plan"
UNFINISHED, REMOVED = ".unfinished-", ".removed-"
NAME = re.compile(r"(\d{6,})-step-(\d+)")
BLOCK_BYTES = 4 * 2**20


class Damaged(Exception):
    """A damaged checkpoint; the text describes the damage."""


@dataclass(frozen=True)
class FileEntry:
    """A file at the time of writing."""

    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: its position in the whole, its sizes, and the file that holds its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first_byte: int


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: its dtype as in program text, its shape, and the pieces that it is made of."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """All facts about a checkpoint. ``values`` are states encoded by ``values.encode``, by their owner;
    ``optimizer`` its groups and the plain values of its state by parameter; ``random`` the random states by
    rank, for ranks whose state differs from the first one's."""

    step: int
    world_size: int
    versions: str
    cluster_fingerprint: str = ""
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    random: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The file's text: the content, and the digest of its one canonical form."""
        # not asdict, which copies everything recursively
        files = {name: vars(entry) for name, entry in self.files.items()}
        tensors = {
            name: {**vars(entry), "pieces": [vars(piece) for piece in entry.pieces]}
            for name, entry in self.tensors.items()
        }
        content = _canonical({"format": FORMAT, **vars(self), "files": files, "tensors": tensors})
        return f'{{"content": {content}, "digest": "{digest_of(content.encode())}"}}\n'

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the checkpoint in ``folder``. Raises Damaged if the manifest is missing, has
        changed, or is of another checkpoint."""
        try:
            told = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise Damaged(f"it has no {MANIFEST}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} cannot be read: {str(error)[:100]}") from None
        content = told.get("content") if isinstance(told, dict) else None
        if not isinstance(content, dict):
            raise Damaged(f"{MANIFEST} is not a manifest")
        if content.get("format") != FORMAT:
            got = str(content.get("format"))[:20]
            raise Damaged(f"it is of format {got}, and this version of mixmesh reads format {FORMAT}")
        try:
            # a ValueError for a number that is not finite, which is never written
            if told.get("digest") != digest_of(_canonical(content).encode()):
                raise Damaged(f"{MANIFEST} has another checksum than was written")
            manifest = cls._of(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{MANIFEST} is not one of format {FORMAT}: {str(error)[:100]}") from None
        named = NAME.fullmatch(folder.name)
        if named is not None and int(named[2]) != manifest.step:
            # files copied whole from an older checkpoint would pass as the newest one
            raise Damaged(f"{MANIFEST} is of step {manifest.step}, and the folder's name of step {named[2]}")
        return manifest

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Manifest:
        content = {k: v for k, v in content.items() if k != "format"}
        if content.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"other parts than {', '.join(cls.__dataclass_fields__)}")
        files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
        if any(os.path.basename(name) != name for name in files):
            raise ValueError("a file that is not in the folder")
        tensors = {}
        for name, entry in content.pop("tensors").items():
            pieces = tuple(
                Piece(tuple(p["offsets"]), tuple(p["sizes"]), p["file"], p["first_byte"])
                for p in entry["pieces"]
            )
            if unknown := {p.file for p in pieces} - set(files):
                raise ValueError(f"no checksum of {min(unknown)}")
            tensors[name] = TensorEntry(entry["dtype"], tuple(entry["shape"]), pieces)
        return cls(files=files, tensors=tensors, **content)


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


new_digest = xxhash.xxh3_128  # hashes as fast as memory is read, because the training waits for it


def digest_of(data: bytes) -> str:
    """The checksum of a whole text."""
    return new_digest(data).hexdigest()


def check_files(folder: Path, files: dict[str, FileEntry], names: Iterable[str]) -> None:
    """Reads these ``names`` of ``files``. Raises Damaged for the first one that has changed."""
    for name in names:
        entry = files[name]
        checksum, size_bytes = new_digest(), 0
        try:
            with (folder / name).open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    checksum.update(block)
                    size_bytes += len(block)
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None
        if size_bytes != entry.size_bytes:
            raise Damaged(f"{name} has {size_bytes} bytes, and {entry.size_bytes} were written")
        if checksum.hexdigest() != entry.digest:
            raise Damaged(f"{name} has another checksum than was written")


# --- folders ---------------------------------------------------------------------------------------------


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first; none if there is no folder."""
    try:
        numbered = [(name, path) for path in folder.iterdir() if (name := NAME.fullmatch(path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for _, path in sorted(numbered, key=lambda pair: int(pair[0][1]), reverse=True)]


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint itself, rather than one that holds several."""
    return (path / MANIFEST).is_file()


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first; a checkpoint itself, if it is one. Raises InputError for
    a file."""
    if path.is_file():
        raise InputError(
            "a checkpoint is a folder, and so is what holds several",
            expected="a folder of checkpoints, or one of them, such as run/000007-step-300",
            got="a file",
            where=str(path),
        )
    return [path] if is_checkpoint(path) else checkpoints_in(path)


def check_is_no_checkpoint(folder: Path) -> None:
    """Raises InputError for a folder that is a checkpoint, where others are to be written."""
    if is_checkpoint(folder):
        raise InputError(
            "checkpoints cannot be written within a checkpoint",
            expected=f"the folder that holds it: {folder.parent}",
            got="a checkpoint",
            where=str(folder),
        )


def number_of(path: Path) -> int:
    """The number of a checkpoint; later checkpoints have larger ones."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def newest_number(folder: Path) -> int:
    """The number of the newest checkpoint of a folder; 0 for none."""
    return max(map(number_of, checkpoints_in(folder)), default=0)


def next_name(folder: Path, step: int) -> str:
    """The name of the next checkpoint: one more than all that are there."""
    return f"{newest_number(folder) + 1:06d}-step-{step}"


def check_is_alone(folder: Path, known: int) -> None:
    """Raises InputError if a folder has a checkpoint after number ``known``, the newest one that this
    training knows."""
    newest = newest_number(folder)
    if newest > known:
        raise InputError(
            "another training writes checkpoints to the same folder",
            expected=f"checkpoint {known} to be the newest, as this training knows it",
            got=f"checkpoint {newest}",
            where=str(folder),
            hint="end one of them, or give it a folder of its own",
        )


def sync(path: Path) -> None:
    """Flushes the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
