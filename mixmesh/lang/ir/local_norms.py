"""Batch norm with statistics of each rank's own samples, as under DistributedDataParallel.

``exact`` batch norm is two operators with an all-reduce in between, and equals the single device. ``local``
batch norm is ``LOCAL_NORM``: a rank normalises its samples by their own mean and variance. Its running
statistics have the placement R although they differ from rank to rank; those of the first rank with samples
are saved, as DistributedDataParallel saves those of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from .graph import Graph, Operation
from .instruction import Instruction
from .placement import Shard
from .program import Program
from .types import rank_sizes

T = TypeVar("T", bound=Operation)

EXACT, LOCAL = "exact", "local"
BATCH_NORMS = (EXACT, LOCAL)
LOCAL_NORM = "mixmesh.local_batch_norm"


def local_norms(operations: Iterable[T]) -> list[T]:
    """The local batch norms among nodes or instructions, in order."""
    return [operation for operation in operations if operation.op == LOCAL_NORM]


def batch_norm_of(source: Program | Graph) -> str:
    """``LOCAL`` if any batch norm uses each rank's own statistics, else ``EXACT``."""
    norms = local_norms(source.instructions) if isinstance(source, Program) else local_norms(source.nodes)
    return LOCAL if norms else EXACT


@dataclass(frozen=True)
class LonelyNorm:
    """A batch norm on a rank with fewer than two values per channel, which are too few for statistics."""

    instruction: Instruction
    rank: int
    values: int


def lonely_norms(program: Program) -> Iterator[LonelyNorm]:
    """Yields each rank whose samples are too few for a local batch norm."""
    for i in local_norms(program.instructions):
        data = i.inputs[0]
        channels = program.types[data].value.shape[1]
        for rank in program.participants(program.types[data]):
            samples, _, *space = program.local_shape(data, rank) or (0, 0)
            values = samples * math.prod(space)
            if values < 2 and channels:
                yield LonelyNorm(i, rank, values)


def own_samples(program: Program) -> dict[str, tuple[int, ...]]:
    """Maps the result of each local batch norm to the numbers of samples that it normalises together, in the
    order of the batch: one per rank with samples, or a single one if all ranks hold all samples."""
    sizes: dict[str, tuple[int, ...]] = {}
    for i in local_norms(program.instructions):
        data, name = program.types[i.inputs[0]], i.results[0]
        if name is None:  # only its statistics are used
            continue
        if isinstance(data.placement, Shard) and data.placement.dim == 0:
            sizes[name] = tuple(n for n in rank_sizes(data, program.ratio(data.ratio)) if n)
        else:
            sizes[name] = (data.value.shape[0],)
    return sizes
