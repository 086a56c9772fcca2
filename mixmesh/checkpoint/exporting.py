"""``mixmesh.checkpoint.export``: writes a checkpoint as safetensors files, like ``save_pretrained``.

One process reads the pieces that all ranks have written, and holds one tensor at a time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.units import plural
from ..errors import InputError
from ..frontend.trace.dtypes import TORCH_DTYPE
from .loading import newest_good
from .manifest import Damaged, Manifest, TensorEntry, check_files, is_checkpoint
from .pretrained import CONFIG, PRETRAINED
from .ranks import Ranks, text_of
from .state import MODEL, OPTIMIZER
from .target import Target
from .tensor_files import Part, copy_box
from .values import decode

DEFAULT_SHARD_BYTES = 50 * 10**9  # the default of save_pretrained in transformers 5
METADATA = {"format": "pt"}  # transformers refuses a file without it
Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True)
class Exported:
    """An exported checkpoint: its path and step, the files written, the number and size of their weights, and
    whether ``config.json`` is in their folder."""

    checkpoint: Path
    step: int
    files: tuple[Path, ...]
    num_tensors: int
    size_bytes: int
    has_config: bool


def export(
    checkpoint: str | Path,
    to: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    optimizer: bool = False,
    config: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Callable[[str], object] = lambda text: None,
) -> Exported:
    """Writes the weights of a checkpoint as safetensors. Not collective: call it in one process.

    ``checkpoint`` is a checkpoint, or a folder of them, of which the newest undamaged one is exported. ``to``
    is a folder, for ``model.safetensors`` with the model's ``config.json``, or the name of a file that ends
    in ``.safetensors``. More than ``max_shard_bytes`` of weights become several files and an index. A tied
    weight is written once, by the first of its names. With ``optimizer`` its state is written too, as
    ``state.PARAMETER.KEY`` in ``optimizer.safetensors``, and its settings in ``optimizer.json``. ``config``
    holds texts by file name that replace the ``config.json`` in the checkpoint.

    Files are renamed into place when all of them are on the disk. Raises InputError for a damaged checkpoint,
    for existing files unless ``force``, and if files cannot be written.
    """
    target = Target.of(Path(to), force=force)
    path, manifest = good_checkpoint(Path(checkpoint))
    weights = entries_of(manifest, MODEL, "")
    state = entries_of(manifest, OPTIMIZER, "state.") if optimizer else {}
    texts = {} if not target.is_pretrained and config is None else dict(config or kept_config(manifest))
    if optimizer:
        if manifest.optimizer is None:
            raise InputError(
                "the checkpoint has no optimizer", where=str(path), hint="export the weights alone"
            )
        texts[f"{target.optimizer_stem}.json"] = settings_text(manifest.optimizer)
    target.check_texts(texts)
    parts = {target.stem: parts_of(weights), target.optimizer_stem: parts_of(state)}
    entries, size_bytes = {**weights, **state}, sum(part.size_bytes for part in parts[target.stem])
    numbers = itertools.count(1)

    def values_of(part: Part) -> Tensor:
        progress(f"exporting {next(numbers)} of {plural(len(entries), 'tensor')}")
        return whole_tensor(path, part.name, entries[part.name])

    files = target.write(parts, texts, max_shard_bytes, METADATA, values_of)
    return Exported(path, manifest.step, files, len(weights), size_bytes, (target.folder / CONFIG).is_file())


def good_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint at ``path``, or the newest good one in that folder, with its manifest. All of its files
    are read. Raises InputError if there is none, or if it is damaged."""
    if not is_checkpoint(path):
        newest = newest_good(path, Ranks(0, 1, None))
        if newest is None:
            raise InputError(
                "there is no checkpoint",
                expected="a checkpoint, such as DIR/000007-step-300, or a folder of checkpoints",
                got="no such folder" if not path.is_dir() else "a folder without any",
                where=str(path),
            )
        return newest
    try:
        manifest = Manifest.read(path)
        check_files(path, manifest.files, manifest.files)
    except Damaged as damage:
        raise InputError(
            "the checkpoint is damaged",
            expected="one that is as it was written",
            got=str(damage),
            where=str(path),
            hint=f"mixmesh export {path.parent} ...  # the newest good one that is there",
        ) from None
    return path, manifest


def entries_of(manifest: Manifest, kind: str, prefix: str) -> dict[str, TensorEntry]:
    """The model's or the optimizer's tensors in a checkpoint (``model:`` or ``optimizer:``), by their names
    in the exported file."""
    entries = {}
    for full_name, entry in manifest.tensors.items():
        if full_name.startswith(kind):
            key, _, name = full_name.removeprefix(kind).rpartition(":")
            entries[f"{prefix}{name}.{key}" if key else f"{prefix}{name}"] = entry
    return entries


def parts_of(entries: Entries) -> list[Part]:
    """The tensors as entries of a file."""
    return [Part(name, entry.dtype, entry.shape) for name, entry in sorted(entries.items())]


def kept_config(manifest: Manifest) -> dict[str, str]:
    """The texts of ``config.json`` and similar files in a checkpoint, by name."""
    return decode(manifest.values.get(PRETRAINED, {"dict": []}))


def settings_text(kept: Mapping[str, Any]) -> str:
    """Formats an optimizer without the tensors of its state as JSON: its class, its groups with the names of
    their parameters, and plain values of its state by parameter."""
    groups = [{"params": group["params"], **decode(group["settings"])} for group in kept["groups"]]
    state = {name: {k: decode(v) for k, v in values.items()} for name, values in kept["state"].items()}
    told = {"class": kept["class"], "groups": groups, "state": state}
    return json.dumps(told, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else str(value)


def whole_tensor(folder: Path, name: str, entry: TensorEntry) -> Tensor:
    """One tensor, joined from its pieces. Raises InputError if they cannot be read, or do not cover it."""
    whole = torch.empty(entry.shape, dtype=TORCH_DTYPE[entry.dtype])
    num_covered = 0
    for piece in entry.pieces:
        box = whole
        for dim, (begin, size) in enumerate(zip(piece.offsets, piece.sizes)):
            box = box.narrow(dim, begin, size)
        where = folder / piece.file
        try:
            copy_box(box, where, piece.first_byte, piece.sizes, whole.dtype, (0,) * len(piece.sizes))
        except OSError as error:
            raise InputError(
                "the checkpoint could not be read", got=text_of(error), where=str(where), hint="start again"
            ) from None
        num_covered += box.numel()
    if num_covered != whole.numel():
        raise InputError(
            f"the checkpoint does not hold all of {name}",
            expected=f"{whole.numel()} elements",
            got=f"pieces of {num_covered} elements",
            where=str(folder),
        )
    return whole
