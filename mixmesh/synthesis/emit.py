"""From a path of the search to a program: instructions with placed types, in order."""

from __future__ import annotations

from ..ir import (
    PARTIAL,
    Graph,
    Instruction,
    Node,
    Placement,
    Program,
    Ratio,
    Ref,
    Replicate,
    Shard,
    TensorType,
    map_refs,
    redistribution,
)
from .problem import Problem, R, code_of
from .search import Found


class Builder:
    """Collects the instructions of one program over one ratio; conversions are made once and reused."""

    def __init__(self, graph: Graph, ratio: Ratio, ratio_name: str = "r0") -> None:
        self.graph = graph
        self.ratio_name = ratio_name
        self.ratios: dict[str, Ratio] = {ratio_name: ratio}
        self.instructions: list[Instruction] = []
        self.types: dict[str, TensorType] = {}
        self.held: dict[str, dict[Placement, str]] = {}  # logical value -> placement -> value that holds it

    def type(self, name: str, placement: Placement, ratio_name: str | None = None) -> TensorType:
        """The type of a logical value held as ``placement``; a ratio is named only where it matters."""
        ratio_name = ratio_name or self.ratio_name
        everyone = all(share > 0 for share in self.ratios[ratio_name])
        named = isinstance(placement, Shard) or not everyone
        return TensorType(self.graph.types[name], (placement,), ratio_name if named else None)

    def append(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        for result, t in zip(instruction.results, instruction.types):
            if result is not None:
                self.types[result] = t

    def leaf(self, node: Node, placement: Placement, ratio_name: str | None = None) -> str:
        held = self.held.setdefault(node.result, {})
        if placement not in held:
            name = node.result if not held else self.fresh(node.result, placement)
            t = self.type(node.result, placement, ratio_name)
            self.append(Instruction((name,), (t,), node.op, node.args, node.kwargs, location=node.location))
            held[placement] = name
        return held[placement]

    def convert(self, value: str, src: Placement, dst: Placement) -> str:
        """``value`` held as ``dst``, made from its ``src`` form if it is not held so yet."""
        held = self.held[value]
        if dst not in held:
            source, t = held[src], self.type(value, dst)
            name = self.fresh(value, dst)
            op = (
                redistribution(src, dst)
                if self.types[source].ratio in (None, t.ratio, self.ratio_name)
                else "move"
            )
            self.append(Instruction((name,), (t,), op, (Ref(source),)))
            held[dst] = name
        return held[dst]

    def fresh(self, value: str, placement: Placement) -> str:
        suffix = {Shard: "s", Replicate: "r"}.get(type(placement), "p")
        if isinstance(placement, Shard):
            suffix += str(placement.dim)
        name, count = f"{value}.{suffix}", 1
        while name in self.types or name in self.graph.types:
            count += 1
            name = f"{value}.{suffix}{count}"
        return name

    def node(self, node: Node, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> None:
        """An operator whose inputs are held as ``inputs`` already."""
        names = iter([self.held[n][p] for n, p in zip(node.inputs, inputs)])
        args = map_refs(node.args, lambda _: Ref(next(names)))
        kwargs = tuple((k, map_refs(v, lambda _: Ref(next(names)))) for k, v in node.kwargs)
        types = []
        for name, value, placement in zip(node.results, node.types, outputs):
            if name is not None:
                self.held[name] = {placement: name}
                types.append(self.type(name, placement))
            else:
                everyone = all(self.ratios[self.ratio_name])
                named = isinstance(placement, Shard) or not everyone
                types.append(TensorType(value, (placement,), self.ratio_name if named else None))
        self.append(Instruction(node.results, tuple(types), node.op, args, kwargs, location=node.location))

    def finish(self) -> Program:
        """The program; the loss is turned into a partial sum if it is held otherwise."""
        loss = self.graph.loss
        if PARTIAL not in self.held[loss]:
            self.convert(loss, next(iter(self.held[loss])), PARTIAL)
        return Program(
            self.graph.name,
            len(next(iter(self.ratios.values()))),
            tuple(self.ratios.items()),
            tuple(self.instructions),
            self.held[loss][PARTIAL],
        )


def emit(problem: Problem, found: Found) -> Program:
    """The program of a path that the search found."""
    builder = Builder(problem.graph, problem.ratio)
    for node in problem.graph.params:
        if problem.use_counts[node.result] == 0:
            builder.leaf(node, problem.placement(problem.ids[node.result], 0))
    for node, move in zip(problem.steps, found.moves):
        for value, code in move.loads:
            builder.leaf(problem.leaves[value], problem.placement(value, code))
        for value, src, dst in move.converts:
            builder.convert(
                problem.names[value], problem.placement(value, src), problem.placement(value, dst)
            )
        strategy = move.option.strategy
        codes = [R] if strategy is None else [code_of(p) for p in strategy.inputs]
        inputs = tuple(problem.placement(problem.ids[name], code) for name, code in zip(node.inputs, codes))
        gives = dict(move.option.gives)
        outputs = tuple(
            problem.placement(problem.ids[name], gives[problem.ids[name]])
            if name is not None
            else unused_placement(node, n, strategy.outputs[n], gives, problem)
            for n, name in enumerate(node.results)
        )
        builder.node(node, inputs, outputs)
    return builder.finish()


def unused_placement(node: Node, n: int, bare: Placement, gives, problem: Problem) -> Placement:
    """The placement of a result that nobody uses: cut as its sibling of the same shape is."""
    for name, value in zip(node.results, node.types):
        if name is not None and isinstance(bare, Shard) and value.shape == node.types[n].shape:
            sibling = problem.placement(problem.ids[name], gives[problem.ids[name]])
            if isinstance(sibling, Shard) and sibling.dim == bare.dim:
                return sibling
    return bare
