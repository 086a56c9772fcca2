"""Batch norm whose statistics are each rank's own: what a model computes under DistributedDataParallel.

``exact`` batch norm is two operators with a sum between all ranks, and equals the single device. ``local``
batch norm is ``LOCAL_NORM``: a rank normalises the samples that it holds by their own mean and variance. Its
running statistics are held as R and are each rank's own; those of the first rank that holds samples count,
as DistributedDataParallel keeps rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .graph import Graph, Node
from .instruction import Instruction
from .placement import Shard, shard_sizes
from .program import Program

EXACT, LOCAL = "exact", "local"
BATCH_NORMS = (EXACT, LOCAL)
LOCAL_NORM = "mixmesh.local_batch_norm"


def local_norms(steps: Iterable[Node | Instruction]) -> list[Node | Instruction]:
    """The nodes or instructions that normalise each rank's samples by themselves, in order."""
    return [step for step in steps if step.op == LOCAL_NORM]


def batch_norm_of(made: Program | Graph) -> str:
    """``LOCAL`` if any batch norm takes each rank's own statistics, else ``EXACT``."""
    steps = made.instructions if isinstance(made, Program) else made.nodes
    return LOCAL if local_norms(steps) else EXACT


@dataclass(frozen=True)
class LonelyNorm:
    """A rank that has fewer than two values of a channel to take statistics of."""

    instruction: Instruction
    rank: int
    values: int


def lonely_norms(program: Program) -> Iterator[LonelyNorm]:
    """Ranks whose own samples are too few for a local batch norm."""
    for i in local_norms(program.instructions):
        data = i.inputs[0]
        channels = program.types[data].value.shape[1]
        for rank in program.participants(program.types[data]):
            shape = program.local_shape(data, rank)
            values = shape[0]
            for size in shape[2:]:
                values *= size
            if values < 2 and channels:
                yield LonelyNorm(i, rank, values)


def own_samples(program: Program) -> dict[str, tuple[int, ...]]:
    """By the result of each local batch norm, the samples of every rank that are normalised by themselves, in
    the order of the batch: one entry where all ranks have all samples.

    A norm that several instructions compute, each for some ranks, is left out.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for i in local_norms(program.instructions):
        data = program.types[i.inputs[0]]
        samples = data.value.shape[0]
        if isinstance(data.placement, Shard) and data.placement.dim == 0:
            cut = shard_sizes(samples, program.ratio_of[data.ratio], data.placement.unit)
            sizes[i.results[0]] = tuple(n for n in cut if n)
        else:
            sizes[i.results[0]] = (samples,)
    return sizes
