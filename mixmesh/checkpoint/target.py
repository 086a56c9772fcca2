"""The files of an export: all are written or none, even if the export is interrupted."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..base.files import write_to_disk
from ..errors import InputError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..runtime.saving import SAFETENSORS, SUFFIXES
from .manifest import BLOCK_BYTES, UNFINISHED, sync
from .ranks import text_of
from .tensor_files import Part, bytes_of, head_of

INDEX = ".index.json"
# endings of names that are meant for files: a folder gpt-v1.5 or gpt.final has none of them
OTHER_FILES = {
    *SUFFIXES, ".safetensor", ".ckpt", ".npz", ".npy", ".h5", ".hdf5", ".onnx", ".gguf", ".pkl", ".pickle",
    ".msgpack", ".index", ".txt", ".json", ".toml", ".yaml", ".yml", ".csv", ".zip", ".tar", ".gz", ".tgz",
}  # fmt: skip
PRETRAINED_STEM, OPTIMIZER_STEM = "model", "optimizer"


@dataclass(frozen=True)
class Target:
    """The target of an export: a folder, and the name of the weights' file without its ending. ``force``:
    existing files may be replaced."""

    folder: Path
    stem: str
    force: bool

    @classmethod
    def of(cls, to: Path, *, force: bool) -> Target:
        """The target named by ``to``, a folder or a safetensors file. Raises InputError if it cannot be
        written to, or if an export is already there and ``force`` is not set."""
        if not to.is_dir() and to.suffix != SAFETENSORS and to.suffix.lower() in OTHER_FILES:
            raise InputError(
                "weights are exported as safetensors",
                expected="a folder, or the name of a file that ends in .safetensors",
                got=str(to),
                hint=str(to.with_suffix(SAFETENSORS)),
            )
        is_file = to.suffix == SAFETENSORS and not to.is_dir()
        target = cls(to.parent, to.stem, force) if is_file else cls(to, PRETRAINED_STEM, force)
        target._check_folder(is_file)
        target._check_not_there(target.existing())
        return target

    def check_texts(self, texts: Mapping[str, str]) -> None:
        """Raises InputError, unless forced, if a file named in ``texts`` already exists with another
        content."""
        there = [self.folder / name for name in texts if (self.folder / name).exists()]
        self._check_not_there([path for path in there if path.read_bytes() != texts[path.name].encode()])

    def _check_not_there(self, paths: Sequence[Path]) -> None:
        if paths and not self.force:
            raise InputError(
                "existing files would be overwritten",
                expected="none of these names",
                got=", ".join(path.name for path in paths[:3]),
                where=str(self.folder),
                hint=("--force, or force=True, replaces them", "or another folder or name"),
            )

    @property
    def is_pretrained(self) -> bool:
        """Whether ``from_pretrained`` will look for this file in the folder."""
        return self.stem == PRETRAINED_STEM

    @property
    def optimizer_stem(self) -> str:
        return OPTIMIZER_STEM if self.is_pretrained else f"{self.stem}.{OPTIMIZER_STEM}"

    def _check_folder(self, is_file: bool) -> None:
        """Raises InputError unless the folder of a file is there and may be written to, or one that will be
        made can be."""
        try:
            there = self.folder
            while not is_file and not there.exists():
                there = there.parent
            got = "" if there.is_dir() else f"no such folder as {there}"
            got = got or ("" if os.access(there, os.W_OK | os.X_OK) else "no permission to write there")
        except OSError as error:
            got = text_of(error)
        if got:
            raise InputError(
                "the export cannot be written there",
                expected="a folder that may be written to, or a file NAME.safetensors in one",
                got=got,
                where=str(self.folder),
                hint="--to PLACE elsewhere",
            )

    def existing(self) -> list[Path]:
        """The tensor files of an earlier export, first those by which readers find the others."""
        stems = "|".join(map(re.escape, (self.stem, self.optimizer_stem)))
        entry = re.compile(rf"({stems})({re.escape(SAFETENSORS)}|{re.escape(SAFETENSORS + INDEX)})")
        other = re.compile(rf"({stems})-\d{{5}}-of-\d{{5}}{re.escape(SAFETENSORS)}")
        paths = sorted(self.folder.iterdir()) if self.folder.exists() else []
        first = [path for path in paths if entry.fullmatch(path.name)]
        return first + [path for path in paths if other.fullmatch(path.name)]

    def write(
        self,
        parts: Mapping[str, Sequence[Part]],
        texts: Mapping[str, str],
        max_shard_bytes: int,
        metadata: Mapping[str, str],
        values_of: Callable[[Part], Tensor],
    ) -> tuple[Path, ...]:
        """Writes ``parts`` by the name of their file and ``texts`` by name, asking ``values_of`` for one
        tensor at a time. Returns the paths. Raises InputError if they cannot be written."""
        leftover = f"{UNFINISHED}{self.stem}-export-"
        unfinished = self.folder / f"{leftover}{secrets.token_hex(4)}"
        names: list[str] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"{leftover}*"):  # leftovers of interrupted exports
                shutil.rmtree(path, ignore_errors=True)
            unfinished.mkdir()
            for name, text in texts.items():
                write_to_disk(unfinished / name, [text.encode()])
                names.append(name)
            for stem, own in parts.items():
                names += write_shards(unfinished, stem, own, max_shard_bytes, metadata, values_of)
            self._replace(unfinished, names)
        except OSError as error:
            raise InputError(
                "the export could not be written", got=text_of(error), where=str(self.folder)
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return tuple(self.folder / name for name in names)

    def _replace(self, unfinished: Path, names: Sequence[str]) -> None:
        """Replaces an earlier export by new files. The files by which readers find the others are removed
        first and written last, so that there is never a mixture of two exports."""
        for path in self.existing():
            path.unlink()
        for name in names:
            (unfinished / name).rename(self.folder / name)
        sync(self.folder)


def shards_of(parts: Sequence[Part], max_shard_bytes: int) -> list[list[Part]]:
    """The parts by file, in order, in the way of huggingface_hub: a file ends before it would exceed the
    limit, and a tensor that exceeds it alone has its own file."""
    shards: list[list[Part]] = []
    current: list[Part] = []
    current_bytes = 0
    for part in parts:
        if part.size_bytes > max_shard_bytes:
            shards.append([part])
            continue
        if current and current_bytes + part.size_bytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(part)
        current_bytes += part.size_bytes
    return [*shards, current] if current else shards


def write_shards(
    folder: Path,
    stem: str,
    parts: Sequence[Part],
    max_shard_bytes: int,
    metadata: Mapping[str, str],
    values_of: Callable[[Part], Tensor],
) -> list[str]:
    """Writes one file, or several with an index. Returns their names, the index last."""
    shards = shards_of(parts, max_shard_bytes)
    names = [f"{stem}-{n:05d}-of-{len(shards):05d}{SAFETENSORS}" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{stem}{SAFETENSORS}"]
    for name, shard in zip(names, shards):
        # in safetensors' own order, in which each begins at a multiple of its element size
        ordered = sorted(shard, key=lambda part: (-TORCH_DTYPE[part.dtype].itemsize, part.name))
        write_to_disk(folder / name, _blocks(ordered, metadata, values_of))
    if len(shards) > 1:
        weight_map = {part.name: name for name, shard in zip(names, shards) for part in shard}
        index = {
            "metadata": {"total_size": sum(part.size_bytes for part in parts)},
            "weight_map": weight_map,
        }
        names.append(f"{stem}{SAFETENSORS}{INDEX}")
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_to_disk(folder / names[-1], [text.encode()])
    return names


def _blocks(
    parts: Sequence[Part], metadata: Mapping[str, str], values_of: Callable[[Part], Tensor]
) -> Iterator[bytes | memoryview]:
    yield head_of(parts, metadata)[0]
    for part in parts:
        yield from _values(values_of(part))


def _values(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in blocks. The tensor is freed at the end, before the next one is read."""
    data = bytes_of(tensor)
    for begin in range(0, len(data), BLOCK_BYTES):
        yield data[begin : begin + BLOCK_BYTES]
