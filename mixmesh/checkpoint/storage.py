"""Writes and reads the tensors of a checkpoint with ``torch.distributed.checkpoint``.

Its planners decide which rank writes which piece, and which pieces a rank needs from others; it also reports
a failure on one rank to all. Files are safetensors and JSON: its own storage keeps metadata and plain values
as pickles, which run code when read. A rank writes and reads one tensor at a time, so it never holds more
than one in addition to its own.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..base.files import write_to_disk
from ..errors import InputError
from ..frontend.trace.dtypes import DTYPE_NAME, TORCH_DTYPE
from .manifest import (
    BLOCK_BYTES,
    MANIFEST,
    PLAN,
    REMOVED,
    UNFINISHED,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    check_is_alone,
    check_is_no_checkpoint,
    digest_of,
    new_digest,
    newest_number,
    next_name,
    number_of,
    sync,
)
from .tensor_files import Part, bytes_of, check_dtype, head_of, read_box

OF_RANK = MetadataIndex("of this rank")


@dataclass(frozen=True)
class RankPart:
    """The part of a manifest that one rank knows: its file, the state of its random numbers, and the plain
    values of the optimizer's state by parameter, all encoded."""

    rank: int
    file: tuple[str, FileEntry] | None
    random: Any
    optimizer_state: dict[str, Any]


# the number of the newest checkpoint in each folder that this process has looked into or written to
_known: dict[Path, int] = {}
_shared: set[str] = set()  # the first rank's folders of which this rank has seen a checkpoint begin


def note_newest(folder: Path) -> None:
    """Notes which checkpoints this process knows: any that come later and are not its own are of another
    training."""
    _known[folder.resolve()] = newest_number(folder)


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint: the first rank's folder of checkpoints, the checkpoint's own folder in it
    until it is complete, its final name, and this rank."""

    folder: str
    unfinished: str
    name: str
    rank: int


@dataclass
class Writer(StorageWriter):
    """Writes a checkpoint into ``folder``. ``part`` is this rank's part of the manifest, ``manifest`` has
    everything that is the same on all ranks, ``plan`` is the text of the plan. ``name`` is known once the
    checkpoint has begun."""

    folder: Path
    manifest: Manifest
    part: RankPart
    plan: str = ""
    name: str = ""
    unfinished: Path | None = field(default=None, init=False)  # on the first rank

    def reset(self, checkpoint_id: Any = None) -> None:
        self.unfinished, self.name = None, ""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            check_dtype(item.index.fqn, _tensor_data(item).properties.dtype)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.folder.mkdir(parents=True, exist_ok=True)
        check_is_no_checkpoint(self.folder)
        known = _known.get(self.folder.resolve())
        if known is None:
            note_newest(self.folder)
        else:
            check_is_alone(self.folder, known)
        remove_leftovers(self.folder)
        name = next_name(self.folder, self.manifest.step)
        self.unfinished = self.folder / f"{UNFINISHED}{name}-{secrets.token_hex(4)}"
        self.unfinished.mkdir()
        folder = str(self.folder.absolute())
        return [
            replace(plan, storage_data=Place(folder, self.unfinished.name, name, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        place: Place = plan.storage_data
        self.name = place.name
        self._check_is_shared(place)
        results, entry = [], None
        if plan.items:
            file_name = f"rank-{place.rank:05d}.safetensors"
            pieces, written = write_file(self.folder / place.unfinished / file_name, plan.items, planner)
            entry = file_name, written
            results = [
                WriteResult(item.index, item.tensor_storage_size() or 0, piece)
                for item, piece in zip(plan.items, pieces)
            ]
        part = replace(self.part, rank=place.rank, file=entry)
        outcome: Future[list[WriteResult]] = Future()
        outcome.set_result([WriteResult(OF_RANK, 0, part), *results])
        return outcome

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = [result.storage_data for rank in results for result in rank if result.index == OF_RANK]
        pieces: dict[str, list[Piece]] = {}
        for result in (result for rank in results for result in rank if result.index != OF_RANK):
            pieces.setdefault(result.index.fqn, []).append(result.storage_data)
        files = dict(part.file for part in parts if part.file is not None)
        for name, entry in files.items():
            self._check_is_here(name, entry)
        folder = self._unfinished_folder
        if self.plan:
            text = self.plan.encode()
            write_to_disk(folder / PLAN, [text])
            files[PLAN] = FileEntry(len(text), digest_of(text))
        tensors = dict(self.manifest.tensors)  # entries of empty tensors
        for name, of in metadata.state_dict_metadata.items():
            assert isinstance(of, TensorStorageMetadata)
            dtype = DTYPE_NAME[of.properties.dtype]
            tensors[name] = TensorEntry(dtype, tuple(of.size), tuple(pieces[name]))
        write_to_disk(folder / MANIFEST, [_joined(self.manifest, parts, files, tensors).text().encode()])
        sync(folder)
        folder.rename(self.folder / self.name)
        _known[self.folder.resolve()] = number_of(self.folder / self.name)
        sync(self.folder)

    def _check_is_shared(self, place: Place) -> None:
        """Raises InputError unless this rank sees the folder that the first rank has made. If it saw earlier
        ones, its file system has a fault, as with a full disk: the training goes on."""
        if (self.folder / place.unfinished).is_dir():
            _shared.add(place.folder)
        elif place.folder not in _shared:
            raise InputError(
                f"rank {place.rank} does not see the folder in which the first rank begins a checkpoint",
                expected=f"{place.unfinished}, which the first rank has made in {place.folder}",
                got="no such folder",
                where=str(self.folder.absolute()),
                hint=(
                    "a folder that all machines share, of the same name on every rank: the first rank's time "
                    "or number may be sent with torch.distributed.broadcast_object_list",
                    "a folder of its own, if another training writes to this one",
                ),
            )

    @property
    def _unfinished_folder(self) -> Path:
        assert self.unfinished is not None  # on the first rank, once the checkpoint has begun
        return self.unfinished

    def _check_is_here(self, name: str, entry: FileEntry) -> None:
        path = self._unfinished_folder / name
        if not path.is_file() or path.stat().st_size != entry.size_bytes:
            raise InputError(
                "a rank's part of the checkpoint is not where the first rank looks for it",
                expected=f"{name} of {entry.size_bytes} bytes in {self.unfinished}",
                got=f"{path.stat().st_size} bytes" if path.is_file() else "no such file",
                hint="a folder that all machines share",
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _joined(
    manifest: Manifest,
    parts: list[RankPart],
    files: dict[str, FileEntry],
    tensors: dict[str, TensorEntry],
) -> Manifest:
    """The manifest, joined from the parts of all ranks."""
    optimizer = manifest.optimizer
    if optimizer is not None:
        state: dict[str, Any] = {}
        for part in reversed(parts):
            for name, values in part.optimizer_state.items():
                state[name] = {**state.get(name, {}), **values}
        optimizer = {**optimizer, "state": state}
    first = parts[0].random
    random = {str(part.rank): part.random for part in parts if part.rank == 0 or part.random != first}
    return replace(manifest, files=files, tensors=tensors, optimizer=optimizer, random=random)


def remove_leftovers(folder: Path) -> None:
    """Removes the leftovers of interrupted writes and removals."""
    for path in folder.iterdir():
        if path.name.startswith((UNFINISHED, REMOVED)):
            shutil.rmtree(path, ignore_errors=True)


def _tensor_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # only tensors are written
    return item.tensor_data


def write_file(path: Path, items: list[WriteItem], planner: SavePlanner) -> tuple[list[Piece], FileEntry]:
    """Writes the tensors of ``items`` one by one as safetensors. Returns the place of each and the file's
    entry."""
    parts = []
    for item in items:
        data = _tensor_data(item)
        chunk, dtype = data.chunk, DTYPE_NAME[data.properties.dtype]
        key = f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"
        parts.append(Part(key, dtype, tuple(chunk.sizes)))
    head, begins = head_of(parts)
    pieces = [
        Piece(tuple(_tensor_data(item).chunk.offsets), part.shape, path.name, begin)
        for item, part, begin in zip(items, parts, begins)
    ]
    checksum, sizes = new_digest(), []

    def blocks() -> Iterator[memoryview]:
        for block in _blocks(head, items, planner):
            checksum.update(block)
            sizes.append(len(block))
            yield block

    write_to_disk(path, blocks())
    return pieces, FileEntry(sum(sizes), checksum.hexdigest())


def _blocks(head: bytes, items: list[WriteItem], planner: SavePlanner) -> Iterator[memoryview]:
    yield memoryview(head)
    for item in items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        data = bytes_of(tensor)
        for begin in range(0, len(data), BLOCK_BYTES):
            yield data[begin : begin + BLOCK_BYTES]


@dataclass
class Reader(StorageReader):
    """Reads the checkpoint in ``folder``, whose manifest was checked against its files."""

    folder: Path
    manifest: Manifest
    _places: dict[MetadataIndex, Piece] = field(default_factory=dict, init=False)

    def reset(self, checkpoint_id: Any = None) -> None:
        self._places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata_of: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, entry in self.manifest.tensors.items():
            chunks = []
            for piece in entry.pieces:
                offsets = torch.Size(piece.offsets)
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece.sizes)))
                self._places[MetadataIndex(name, offsets)] = piece
            properties = TensorProperties(dtype=TORCH_DTYPE[entry.dtype])
            metadata_of[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(metadata_of)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            piece = self._places[item.storage_index]
            dtype = TORCH_DTYPE[self.manifest.tensors[item.storage_index.fqn].dtype]
            with torch.no_grad():
                path, box = self.folder / piece.file, (item.storage_offsets, item.lengths)
                values = read_box(path, piece.first_byte, piece.sizes, dtype, *box)
                planner.resolve_tensor(item).copy_(values)
        all_read: Future[None] = Future()
        all_read.set_result(None)
        return all_read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
