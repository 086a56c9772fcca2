"""Costs of the instructions of a program: the shares of work, times and collectives that simulator, LP
and report all read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..ir import Instruction, Program, Shard, TensorType, shard_sizes
from ..rules import call_of
from .model import CostModel, OpTime

LOCAL = frozenset({"local_slice", "as_partial", "pad_partial"})
DUAL_COLLECTIVE = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "move": "move"}


def held_share(program: Program, t: TensorType, rank: int) -> float:
    """The share of a tensor that a rank holds, by integer sizes; 0 if it takes no part."""
    ratio = program.ratio(t.ratio)
    if ratio is not None and ratio[rank] == 0:
        return 0.0
    if not isinstance(t.placement, Shard):
        return 1.0
    return _shares(t.value.shape[t.placement.dim], ratio, t.placement.unit)[rank]


@lru_cache(maxsize=65536)
def _shares(size: int, ratio, unit: int) -> tuple[float, ...]:
    if size == 0:
        return (0.0,) * len(ratio)
    return tuple(n / size for n in shard_sizes(size, ratio, unit))


def work_type(program: Program, i: Instruction) -> TensorType:
    """The type whose share is the share of the work: a sharded result or input, else the result."""
    types = list(i.types) + [program.types[name] for name in i.inputs]
    return next((t for t in types if isinstance(t.placement, Shard)), types[0])


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of a program: its name, the whole tensor's bytes, and the ranks that meet."""

    name: str
    size_bytes: int
    ranks: tuple[int, ...]

    def seconds(self, costs: CostModel) -> float:
        if len(self.ranks) < 2:
            return 0.0
        name = "all_to_all" if self.name == "move" else self.name
        return costs.collective(name, self.ranks).seconds(self.size_bytes)


def exchange_of(program: Program, i: Instruction, *, backward: bool = False) -> Exchange | None:
    """The collective that a redistribution issues forward, or in the backward pass; None if it is local."""
    if not i.is_redistribution or i.op in LOCAL:
        return None
    source = program.types[i.inputs[0]]
    ranks = tuple(sorted({*program.participants(source), *program.participants(i.type)}))
    if len(ranks) < 2:
        return None
    name = DUAL_COLLECTIVE.get(i.op, i.op) if backward else i.op
    return Exchange(name, i.type.value.size_bytes, ranks)


def op_time(program: Program, i: Instruction, costs: CostModel, device_class: int) -> OpTime:
    call = call_of(i, program.types)
    grads = sum(1 for name in dict.fromkeys(i.inputs) if name in program.requires_grad)
    return costs.op(call, grads, device_class)


def is_computation(i: Instruction) -> bool:
    return not (i.is_leaf or i.is_redistribution or i.op == "update")


def synchronised(program: Program, i: Instruction) -> bool:
    """Whether a parameter's gradient must be summed over ranks after the backward pass."""
    return (
        i.op == "param"
        and i.result in program.requires_grad
        and not isinstance(i.type.placement, Shard)
        and len(program.participants(i.type)) > 1
    )
