"""Writes and reads pieces of a tensor, of any sizes, with ``torch.distributed.checkpoint``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Piece = tuple[tuple[int, ...], Tensor]  # (origin in the whole tensor, values)


def chunks(piece: Piece) -> list[ChunkStorageMetadata]:
    """The part of the whole that this rank holds: one box, or none."""
    origin, values = piece
    if not values.numel():
        return []
    return [ChunkStorageMetadata(offsets=torch.Size(origin), sizes=values.shape)]


def write_items(name: str, shape: torch.Size, piece: Piece) -> list[WriteItem]:
    """The items that this rank writes for the tensor ``name``, whose whole shape is ``shape``."""
    properties = TensorProperties.create_from_tensor(piece[1])
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunks(piece)
    ]
