"""The differences between two programs of one graph: in instructions, and in the collectives of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..cost import CostModel
from ..cost.exchanges import Exchange, exchange_of
from ..cost.outline import is_factored, is_resharded
from ..cost.sums import gradient_bytes, gradient_sums
from ..lang.ir import Instruction, Program, Ref, map_arguments

HOW = ("bucket", "algorithm", "gradient_algorithm")  # attributes that follow from the rest of the program


@dataclass(frozen=True)
class Collective:
    """A collective that only one of two programs has.

    ``value`` is a tensor of the graph; a parameter has its path. ``phase`` is ``forward``, ``backward``,
    ``again`` (a gather that the backward pass repeats), ``gradient`` (a parameter's part in the reduction of
    a bucket, with its share of the seconds by bytes) or ``stepped`` (its part in the gather of parameters
    that their shard owners stepped).
    """

    name: str
    value: str
    phase: str
    size_bytes: int
    num_ranks: int
    time_s: float

    @property
    def key(self) -> tuple:
        return (self.name, self.value, self.phase, self.size_bytes, self.num_ranks)


def num_differing(a: Program, b: Program) -> int:
    """The number of instructions that only one of the programs has; the larger of the two numbers. Values
    that hold the same tensor with the same placement count as equal whatever their names, and buckets do not
    count."""
    one, two = Counter(_instructions(a)), Counter(_instructions(b))
    return max((one - two).total(), (two - one).total())


def collectives_between(
    before: Program, after: Program, costs: CostModel
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The collectives that only ``after`` has, and those that only ``before`` has; the longest first."""
    one, two = tuple(collectives(before, costs)), tuple(collectives(after, costs))
    return _without(two, one), _without(one, two)


def _without(these: tuple[Collective, ...], those: tuple[Collective, ...]) -> tuple[Collective, ...]:
    left = Counter(c.key for c in those)
    out = []
    for c in these:
        if left[c.key]:
            left[c.key] -= 1
        else:
            out.append(c)
    return tuple(sorted(out, key=lambda c: -c.time_s))


def collectives(program: Program, costs: CostModel) -> Iterator[Collective]:
    """All collectives of a step except that of the loss, with their seconds in the simulator."""
    tensor_of = _tensors(program)

    def collective(exchange: Exchange, value: str, phase: str) -> Collective:
        return Collective(
            exchange.name,
            tensor_of[value],
            phase,
            exchange.size_bytes,
            len(exchange.ranks),
            exchange.seconds(costs),
        )

    for i in program.instructions:
        exchange = exchange_of(program, i)
        if exchange is not None:
            yield collective(exchange, i.result, "forward")
            if i.result in program.requires_grad and is_resharded(program, i):
                yield collective(exchange, i.result, "again")
        if i.is_redistribution and i.result in program.requires_grad:
            exchange = exchange_of(program, i, backward=True)
            if exchange is not None:
                yield collective(exchange, i.result, "backward")
        if is_factored(i) and len(ranks := program.participants(i.type)) > 1:
            has_weight = i.inputs[1] in program.requires_grad  # otherwise only the bias has a gradient
            for value in (i.result, i.inputs[0])[: 1 + has_weight]:
                size = program.types[value].value.size_bytes
                yield collective(Exchange("all_gather", size, ranks), value, "backward")
    yield from _gradient_collectives(program, costs, tensor_of)


def _gradient_collectives(
    program: Program, costs: CostModel, tensor_of: dict[str, str]
) -> Iterator[Collective]:
    """The collectives of gradients, parameter by parameter: each has its part of the bucket's seconds."""
    for bucket in gradient_sums(program):
        passed = [(bucket.exchange, "gradient"), *([(bucket.gather, "stepped")] if bucket.owned else [])]
        for p, cell in zip(bucket.params, bucket.cells or (None,) * len(bucket.params)):
            size = gradient_bytes(p, cell)
            part = size / bucket.size_bytes if bucket.size_bytes else 0.0
            for exchange, phase in passed:
                part_s = exchange.seconds(costs) * part
                yield Collective(exchange.name, tensor_of[p.result], phase, size, len(bucket.ranks), part_s)


def _tensors(program: Program) -> dict[str, str]:
    """Maps each value to the tensor of the graph that it holds; a leaf is named by its path."""
    out: dict[str, str] = {}
    for i in program.instructions:
        for name in i.results:
            if name is not None:
                if i.is_redistribution:
                    out[name] = out[i.inputs[0]]
                else:
                    path = i.is_leaf and i.args and isinstance(i.args[0], str)
                    out[name] = i.args[0] if path else name
    return out


def _instructions(program: Program) -> Iterator[tuple]:
    """Yields instructions without the names of values: a use is the tensor and its placement."""
    tensor_of = _tensors(program)

    def held(ref: Ref) -> tuple[object, ...]:
        return ("%", tensor_of[ref.name], program.types[ref.name].placement)

    for i in program.instructions:
        yield (
            i.op,
            *map_arguments(i.args, i.kwargs, held),
            tuple(tensor_of[r] if r is not None else None for r in i.results),
            tuple((t.value, t.placement) for t in i.types),
            _attributes(i),
        )


def _attributes(i: Instruction) -> tuple:
    return tuple((k, v) for k, v in i.attrs if k not in HOW)
