"""Weight files: a single safetensors file, several with an index, or a folder that ``save_pretrained``
made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..base.files import read_text
from ..errors import InputError
from ..runtime.saving import SAFETENSORS as SUFFIX
from .manifest import checkpoints_in
from .ranks import text_of
from .tensor_files import SAFETENSORS, Part

INDEX = ".index.json"
SINGLE, INDEXED = f"model{SUFFIX}", f"model{SUFFIX}{INDEX}"
MAX_INDEX_BYTES = 2**28
DTYPE_OF = {theirs: ours for ours, theirs in SAFETENSORS.items()}


@dataclass(frozen=True)
class Held:
    """A tensor in a file, and its offset in the file."""

    path: Path
    part: Part
    first_byte: int


def held_tensors(place: Path) -> dict[str, Held]:
    """The tensors by name, without their values, in a safetensors file, in the files of an index, or in a
    folder with either. Raises InputError for anything else, and for damaged files."""
    path = _entry(place)
    if path.suffix == SUFFIX:
        return tensors_in(path)
    names_by_file: dict[str, list[str]] = {}
    for name, file in _weight_map(path).items():
        names_by_file.setdefault(file, []).append(name)
    tensor_of: dict[str, Held] = {}
    for file, names in names_by_file.items():
        held = tensors_in(path.parent / file)
        if missing := [name for name in names if name not in held]:
            raise _unreadable(path.parent / file, f"no {missing[0]}, which {path.name} says is there")
        tensor_of |= {name: held[name] for name in names}
    return tensor_of


def _entry(place: Path) -> Path:
    """The file to begin with: a safetensors file, or an index."""
    if not place.exists():
        raise _unreadable(place, "no such file or folder")
    if place.is_dir():
        for name in (SINGLE, INDEXED):
            if (place / name).is_file():
                return place / name
        hint = f"{place.name}/{SINGLE}, or name the file itself"
        if checkpoints_in(place):
            hint = (
                f"--checkpoint {place} goes on with these; mixmesh export {place} --to FOLDER makes weights"
            )
        raise InputError(
            "there are no weights in this folder",
            expected=f"{SINGLE} or {INDEXED}",
            where=str(place),
            hint=hint,
        )
    if place.suffix != SUFFIX and not place.name.endswith(INDEX):
        raise InputError(
            "weights are read from safetensors",
            expected=f"a file *{SUFFIX}, an index *{SUFFIX}{INDEX}, or a folder",
            got=str(place),
            hint="in Python: safetensors.torch.save_model(model, 'model.safetensors')",
        )
    return place


def _weight_map(path: Path) -> dict[str, str]:
    try:
        index = json.loads(read_text(path, MAX_INDEX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, text_of(error)) from None
    names: Any = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise _unreadable(path, "no weight_map")
    for file in names.values():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != SUFFIX:
            raise _unreadable(path, f"{str(file)[:100]!r} in the place of a file beside it")
    return names


def tensors_in(path: Path) -> dict[str, Held]:
    """The tensors of one file by name. Raises InputError for a file of another format, or one that is cut
    short."""
    try:
        with safe_open(path, framework="pt"):  # checks that the file is complete, and reads no tensor
            pass
        with path.open("rb") as file:
            size_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size_bytes))
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, text_of(error)) from None
    file_of = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPE_OF:
            raise _unreadable(path, f"{name} of the dtype {entry['dtype']}, which is not known here")
        part = Part(name, DTYPE_OF[entry["dtype"]], tuple(entry["shape"]))
        file_of[name] = Held(path, part, 8 + size_bytes + entry["data_offsets"][0])
    return file_of


def _unreadable(path: Path, reason: str) -> InputError:
    return InputError(
        "the weights cannot be read",
        expected="a file of safetensors that is whole",
        got=reason,
        where=str(path),
    )
