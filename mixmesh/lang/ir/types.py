"""Types of values: a dtype, a global shape, and a placement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ...base.lazy import lazy
from .placement import REPLICATE, Placement, Ratio, Scope, Shard, shard_sizes, support

# printed name -> bytes per element; the names are those of MLIR
DTYPE_BYTES = {
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "f8e4m3": 1, "f8e5m2": 1,
    "c64": 8, "c128": 16,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
}  # fmt: skip
FLOATING = frozenset({"f64", "f32", "bf16", "f16", "f8e4m3", "f8e5m2", "c64", "c128"})


class Cut(NamedTuple):  # the key of many tables: hashed in a fraction of a frozen dataclass's time
    """The facts that decide how much of a value each rank holds: the size and unit of the cut dim (0 and 1
    for a value held whole), the name of the ratio, and the samples to which its shares refer."""

    size: int
    unit: int
    ratio: str | None
    scope: Scope = Scope.STEP

    @property
    def whole(self) -> Cut:
        """A value that the same ranks hold, each the whole of it."""
        return Cut(0, 1, self.ratio, self.scope)

    @property
    def of_step(self) -> Cut:
        """The cut with shares of all samples of a step."""
        return Cut(self.size, self.unit, self.ratio)


EVERYWHERE = Cut(0, 1, None)  # whole on every rank


@dataclass(frozen=True)  # no slots, because ``lazy`` values are stored in the instance
class ValueType:
    """The logical type of a value: dtype and global shape, without a placement."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @lazy
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @lazy
    def size_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOATING


@dataclass(frozen=True)  # no slots, as above
class TensorType:
    """A value type with its placement and the name of the ratio that cuts it.

    ``ratio`` also decides the participants: ranks whose share is zero hold no part of the tensor. It may be
    None only if nothing is sharded, and then every rank participates. ``scope`` says to which samples its
    shares refer.
    """

    value: ValueType
    placement: Placement = REPLICATE
    ratio: str | None = None
    scope: Scope = Scope.STEP

    @property
    def shard(self) -> Shard:
        """The placement of a type that is known to be cut. Raises TypeError for one that is not."""
        if not isinstance(self.placement, Shard):
            raise TypeError(f"{self} is not cut")
        return self.placement

    @lazy
    def cut(self) -> Cut:
        if isinstance(self.placement, Shard):
            return Cut(self.value.shape[self.placement.dim], self.placement.unit, self.ratio, self.scope)
        return Cut(0, 1, self.ratio, self.scope)

    def __str__(self) -> str:
        text = f"{self.value} {self.placement}" + (f"@{self.ratio}" if self.ratio else "")
        return text if self.scope is Scope.STEP else f"{text} of a micro-batch"


def rank_sizes(t: TensorType, ratio: Ratio | None) -> tuple[int, ...]:
    """The number of elements of the cut dim that each rank holds; ``ratio`` is the one that ``t`` names.
    Raises TypeError for a type that is not cut, ValueError without a ratio."""
    shard = t.shard
    if ratio is None:
        raise ValueError(f"{t} has no ratio")
    return shard_sizes(t.value.shape[shard.dim], ratio, shard.unit)


def local_shape(
    value: ValueType, placement: Placement, ratio: Ratio | None, rank: int
) -> tuple[int, ...] | None:
    """The shape that ``rank`` holds, or None if it holds nothing of the tensor."""
    if ratio is not None and ratio[rank] == 0:
        return None
    if not isinstance(placement, Shard):
        return value.shape
    if ratio is None:
        raise ValueError(f"{value} {placement} has no ratio")
    size = shard_sizes(value.shape[placement.dim], ratio, placement.unit)[rank]
    return value.shape[: placement.dim] + (size,) + value.shape[placement.dim + 1 :]


def local_bytes(value: ValueType, placement: Placement, ratio: Ratio | None, rank: int) -> int:
    shape = local_shape(value, placement, ratio, rank)
    return 0 if shape is None else math.prod(shape) * DTYPE_BYTES[value.dtype]


def participants(ratio: Ratio | None, world_size: int) -> tuple[int, ...]:
    """The ranks that hold something of a tensor under ``ratio``; without one, all ranks."""
    return tuple(range(world_size)) if ratio is None else support(ratio)
