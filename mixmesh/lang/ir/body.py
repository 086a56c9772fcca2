"""The facts that follow from a program's instructions alone, computed once for all programs that share
them."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.lazy import lazy
from .graph import Graph, Node, Ref, gradient_flow, map_arguments
from .instruction import Instruction
from .placement import Shard
from .types import TensorType, ValueType

# for each parameter, the number of the bucket in which its gradient is summed
Buckets = tuple[int | None, ...]


# one object stays the same however attributes and ratios change, so it serves as a key
@dataclass(frozen=True, eq=False)
class Values:
    """The facts that depend neither on attributes nor on the order of ``instructions``."""

    instructions: tuple[Instruction, ...]
    loss: str

    @lazy
    def types(self) -> dict[str, TensorType]:
        return {r: t for i in self.instructions for r, t in zip(i.results, i.types) if r is not None}

    @lazy
    def requires_grad(self) -> frozenset[str]:
        return gradient_flow(self.instructions, self.loss, {k: t.value for k, t in self.types.items()})


@dataclass(frozen=True, eq=False)  # one object for each tuple of instructions, so it serves as a key
class Body:
    """The instructions that are shared by programs which differ only in their ratios and in how they sum.
    ``values`` is shared by all bodies that differ only in attributes."""

    name: str
    instructions: tuple[Instruction, ...]
    loss: str
    values: Values

    def is_of(self, name: str, instructions: tuple[Instruction, ...], loss: str) -> bool:
        return self.instructions is instructions and self.loss == loss and self.name == name

    def changed(self, instructions: tuple[Instruction, ...]) -> Body:
        """The body of the same instructions with other attributes, or in another order."""
        return Body(self.name, instructions, self.loss, self.values)

    @lazy
    def producers(self) -> dict[str, Instruction]:
        return {r: i for i in self.instructions for r in i.results if r is not None}

    @lazy
    def params(self) -> tuple[Instruction, ...]:
        return tuple(i for i in self.instructions if i.op == "param")

    @lazy
    def batch_inputs(self) -> tuple[Instruction, ...]:
        return tuple(i for i in self.instructions if i.op == "input")

    @lazy
    def computations(self) -> tuple[Instruction, ...]:
        """All instructions except those that load parameters."""
        return tuple(i for i in self.instructions if i.op != "param")

    @lazy
    def moves_pieces(self) -> bool:
        """Whether any redistribution begins or ends with values that are cut."""
        types = self.values.types
        return any(
            isinstance(t.placement, Shard)
            for i in self.instructions
            if i.is_redistribution
            for t in (i.type, types[i.inputs[0]])
        )

    @lazy
    def buckets(self) -> Buckets:
        """The bucket number of each parameter; None for one without."""
        return tuple(i.attr("bucket") if i.attrs else None for i in self.params)

    @lazy
    def wgrads(self) -> dict[int, str]:
        """The values of ``wgrad``, which say when a weight gradient is computed, by index of the
        instruction."""
        said = [(n, i.attr("wgrad")) for n, i in enumerate(self.instructions) if i.attrs]
        return {n: when for n, when in said if when is not None}

    @lazy
    def copies(self) -> dict[str, tuple[Instruction, ...]]:
        """The parameters, by name, that several instructions load, each for different ranks (see
        ``copies``)."""
        loads: dict[str, list[Instruction]] = {}
        if len({i.args[0] for i in self.params}) == len(self.params):
            return {}  # the usual case; every program that planning makes is asked
        for i in self.params:
            loads.setdefault(i.args[0], []).append(i)
        return {name: tuple(every) for name, every in loads.items() if len(every) > 1}

    @lazy
    def factored(self) -> frozenset[str]:
        """Parameters whose gradients are computed from gathered factors (``sfb``), and therefore never
        summed."""
        users = [i for i in self.instructions if i.attrs and i.attr("sfb", False)]
        return frozenset(name for i in users for name in i.inputs if self.producers[name].op == "param")

    @lazy
    def graph(self) -> Graph:
        """The logical graph: the program without its placements and redistributions."""
        alias: dict[str, str] = {}

        def resolve(ref: Ref) -> Ref:
            return type(ref)(alias.get(ref.name, ref.name))

        nodes = []
        for i in self.instructions:
            if i.is_redistribution:
                alias[i.result] = alias.get(i.inputs[0], i.inputs[0])
                continue
            values: tuple[ValueType, ...] = tuple(t.value for t in i.types)
            args, kwargs = map_arguments(i.args, i.kwargs, resolve)
            nodes.append(Node(i.results, values, i.op, args, kwargs, i.location))
        return Graph(self.name, tuple(nodes), alias.get(self.loss, self.loss))
