"""Safetensors files, written one tensor at a time and read one block at a time.

The safetensors library writes tensors that are all in memory, and everything read through it stays mapped,
and so counts as this process's memory. The format is 8 bytes with the size of a JSON text, the text, which
gives the place of each tensor, and the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..frontend.trace.dtypes import DTYPE_NAME, TORCH_DTYPE
from .manifest import BLOCK_BYTES

# safetensors' names for the dtypes of program text
SAFETENSORS = {name: name.upper() for name in DTYPE_NAME.values() if name != "c128"}
SAFETENSORS |= {"f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2"}
ALIGNED_BYTES = 8  # safetensors pads its header to this


@dataclass(frozen=True)
class Part:
    """A tensor in a file: its name there, its dtype as in program text, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * TORCH_DTYPE[self.dtype].itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises InputError for a tensor whose dtype safetensors cannot store."""
    if DTYPE_NAME.get(dtype) not in SAFETENSORS:
        raise InputError(
            f"{name} cannot be kept in a checkpoint", expected=", ".join(SAFETENSORS), got=str(dtype)
        )


def head_of(parts: Sequence[Part], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[int]]:
    """The header of a file that holds ``parts`` in this order, and the offset of each part in the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = [], 0
    for part in parts:
        begins.append(end)
        end += part.size_bytes
        kind, offsets = SAFETENSORS[part.dtype], [begins[-1], end]
        header[part.name] = {"dtype": kind, "shape": list(part.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED_BYTES)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + begin for begin in begins]


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a plain tensor in their order, as bytes in host memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def read_box(
    path: Path,
    first_byte: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """The box at ``offsets`` with sizes ``lengths``, in a tensor of shape ``sizes`` that begins at
    ``first_byte`` of a file. Only rows (of dim 0) in the box are read. Raises OSError if the file cannot be
    read or ends early."""
    if 0 in sizes or 0 in lengths:
        return torch.empty(tuple(lengths), dtype=dtype)
    first, count = (offsets[0], lengths[0]) if sizes else (0, 1)
    rest = tuple(sizes[1:])
    row_bytes = math.prod(rest) * dtype.itemsize
    data = bytearray(count * row_bytes)
    with path.open("rb") as file:
        file.seek(first_byte + first * row_bytes)
        if file.readinto(data) != len(data):
            raise OSError(f"{path.name} ends early")
    box = torch.frombuffer(data, dtype=dtype).reshape((count, *rest) if sizes else ())
    for dim in range(1, len(sizes)):
        box = box.narrow(dim, offsets[dim], lengths[dim])
    return box


def copy_box(
    target: Tensor,
    path: Path,
    first_byte: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
) -> None:
    """Copies the box at ``offsets`` that has the shape of ``target`` into it, a block of rows at a time. The
    other arguments and errors are those of ``read_box``."""
    if not target.ndim:
        target.copy_(read_box(path, first_byte, sizes, dtype, offsets, ()))
        return
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    num_rows = max(BLOCK_BYTES // max(row_bytes, 1), 1)
    for begin in range(0, target.shape[0], num_rows):
        rows = target[begin : begin + num_rows]
        where = (offsets[0] + begin, *offsets[1:])
        rows.copy_(read_box(path, first_byte, sizes, dtype, where, tuple(rows.shape)))
