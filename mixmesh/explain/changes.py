"""The differences between two programs of one graph: their instructions, and the collectives of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..cost import CostModel
from ..cost.exchanges import Exchange, exchange_of
from ..cost.outline import is_factored, is_resharded
from ..cost.sums import gradient_bytes, gradient_sums
from ..lang.ir import Instruction, Program, Ref, map_refs

HOW = ("bucket", "algorithm", "gradient_algorithm")  # attributes that follow from the rest


@dataclass(frozen=True)
class Collective:
    """A collective that one program has and another has not.

    ``value`` is a tensor of the graph, a parameter by its path. ``phase``: ``forward``, ``backward``,
    ``again`` (a gather that the backward pass repeats), ``gradient`` (a parameter's part in the sum of a
    bucket, with as much of its seconds as it has of its bytes) or ``stepped`` (its part in the gather of what
    owners have stepped).
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


def differing(a: Program, b: Program) -> int:
    """How many instructions one of the programs has that the other has not: the larger of both numbers.
    Names of values that hold the same tensor in the same way are alike, and so are buckets."""
    one, two = Counter(_instructions(a)), Counter(_instructions(b))
    return max((one - two).total(), (two - one).total())


def collectives_between(
    before: Program, after: Program, costs: CostModel
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The collectives that ``after`` has and ``before`` has not, and the reverse; the longest first."""
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
    """All collectives of a step but the sum of the loss, with their seconds as the simulator has them."""
    called = _called(program)

    def made(exchange: Exchange, value: str, phase: str) -> Collective:
        return Collective(
            exchange.name,
            called[value],
            phase,
            exchange.size_bytes,
            len(exchange.ranks),
            exchange.seconds(costs),
        )

    for i in program.instructions:
        exchange = exchange_of(program, i)
        if exchange is not None:
            yield made(exchange, i.result, "forward")
            if i.result in program.requires_grad and is_resharded(program, i):
                yield made(exchange, i.result, "again")
        if i.is_redistribution and i.result in program.requires_grad:
            exchange = exchange_of(program, i, backward=True)
            if exchange is not None:
                yield made(exchange, i.result, "backward")
        if is_factored(i) and len(ranks := program.participants(i.type)) > 1:
            has_weight = i.inputs[1] in program.requires_grad  # otherwise the bias alone takes a gradient
            for value in (i.result, i.inputs[0])[: 1 + has_weight]:
                size = program.types[value].value.size_bytes
                yield made(Exchange("all_gather", size, ranks), value, "backward")
    yield from _of_gradients(program, costs, called)


def _of_gradients(program: Program, costs: CostModel, called: dict[str, str]) -> Iterator[Collective]:
    """The sums of gradients, parameter by parameter: each has its part of the bucket's seconds."""
    for bucket in gradient_sums(program):
        passed = [(bucket.exchange, "gradient"), *([(bucket.gather, "stepped")] if bucket.owned else [])]
        for p, cell in zip(bucket.params, bucket.cells or (None,) * len(bucket.params)):
            size = gradient_bytes(p, cell)
            part = size / bucket.size_bytes if bucket.size_bytes else 0.0
            for exchange, phase in passed:
                part_s = exchange.seconds(costs) * part
                yield Collective(exchange.name, called[p.result], phase, size, len(bucket.ranks), part_s)


def _called(program: Program) -> dict[str, str]:
    """Values -> what they hold: the value of the graph, a leaf by its path."""
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
    """Instructions without names: a use is the tensor and how it is held."""
    called = _called(program)

    def held(ref: Ref) -> tuple:
        return ("%", called[ref.name], program.types[ref.name].placement)

    for i in program.instructions:
        yield (
            i.op,
            map_refs(i.args, held),
            tuple((k, map_refs(v, held)) for k, v in i.kwargs),
            tuple(called[r] if r is not None else None for r in i.results),
            tuple((t.value, t.placement) for t in i.types),
            _attributes(i),
        )


def _attributes(i: Instruction) -> tuple:
    return tuple((k, v) for k, v in i.attrs if k not in HOW)
