"""From a path of the search to a program: instructions with placed types, in order."""

from __future__ import annotations

from ..ir import (
    PARTIAL,
    REPLICATE,
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
from .choices import R, code_of
from .problem import Problem
from .search import Found


class Builder:
    """Collects the instructions of one program over one ratio; conversions are made once and reused."""

    def __init__(self, graph: Graph, ratio: Ratio, ratio_name: str = "r0") -> None:
        self.graph = graph
        self.ratio_name = ratio_name
        self.ratios: dict[str, Ratio] = {ratio_name: ratio}
        self._everyone: dict[str, bool] = {}
        self.instructions: list[Instruction] = []
        self.types: dict[str, TensorType] = {}
        self.held: dict[str, dict[Placement, str]] = {}  # logical value -> placement -> value that holds it

    def type(self, name: str, placement: Placement, ratio_name: str | None = None) -> TensorType:
        """The type of a logical value held as ``placement``; a ratio is named only where it matters."""
        ratio_name = ratio_name or self.ratio_name
        named = isinstance(placement, Shard) or not self.everyone(ratio_name)
        return TensorType(self.graph.types[name], (placement,), ratio_name if named else None)

    def everyone(self, ratio_name: str) -> bool:
        """Whether every rank takes part under a ratio."""
        if ratio_name not in self._everyone:
            self._everyone[ratio_name] = all(share > 0 for share in self.ratios[ratio_name])
        return self._everyone[ratio_name]

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
                named = isinstance(placement, Shard) or not self.everyone(self.ratio_name)
                types.append(TensorType(value, (placement,), self.ratio_name if named else None))
        self.append(Instruction(node.results, tuple(types), node.op, args, kwargs, location=node.location))

    def finish(self) -> Program:
        """The program; the loss is turned into a partial sum if it is held otherwise."""
        loss = self.graph.loss
        self.instructions = hidden_first(self.instructions, self.graph)
        if PARTIAL not in self.held[loss]:
            self.convert(loss, next(iter(self.held[loss])), PARTIAL)
        return Program(
            self.graph.name,
            len(next(iter(self.ratios.values()))),
            tuple(self.ratios.items()),
            tuple(self.instructions),
            self.held[loss][PARTIAL],
        )


def hidden_first(instructions: list[Instruction], graph: Graph) -> list[Instruction]:
    """Communication that no gradient passes and that depends on the batch only (a count of labels) moves
    to the front, with all that leads to it: it then runs beside the forward pass."""
    source: dict[str, Instruction] = {r: i for i in instructions for r in i.results if r is not None}
    bound: set[str] = set()  # values that parameters, random numbers or gradients tie to their place
    first: set[int] = set()
    for i in instructions:
        if (
            i.op in ("param", "buffer")
            or any(word in i.op for word in RANDOM)
            or any(name in bound for name in i.inputs)
            or any(r in graph.requires_grad for r in i.results)
        ):
            bound.update(r for r in i.results if r is not None)
        elif i.op in COLLECTIVE_OPS:
            waiting = [i]
            while waiting:
                this = waiting.pop()
                if id(this) not in first:
                    first.add(id(this))
                    waiting += [source[name] for name in this.inputs]
    return [i for i in instructions if id(i) in first] + [i for i in instructions if id(i) not in first]


# operators that draw numbers, which depend on their order
RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal")
COLLECTIVE_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def emit(problem: Problem, found: Found) -> Program:
    """The program of a path that the search found, over the whole graph: a step of a repeated block that was
    folded takes the move of the kept step that it follows."""
    fold = problem.choices.fold
    builder = Builder(fold.whole, problem.ratio)
    nodes = [n for n in fold.whole.nodes if not n.is_leaf]
    leaves = {n.result: n for n in fold.whole.nodes if n.is_leaf}
    path = [_Placed(node, problem, found, n) for node, n in zip(nodes, fold.origins)]
    used = {name for placed in path for name in placed.inputs}
    for node in fold.whole.params:
        if node.result not in used:
            builder.leaf(node, REPLICATE)
    loads: dict[str, int] = {}  # whole where steps load a leaf in several ways
    for placed in path:
        for name, code in placed.loads:
            loads[name] = code if loads.get(name, code) == code else R
    for placed in path:
        for name, value, code in placed.needs:
            if name in leaves and name not in builder.held:
                builder.leaf(leaves[name], problem.placement(value, loads.get(name, code)))
            ensure(builder, problem, name, value, code)
        builder.node(placed.node, *placed.placements())
    return builder.finish()


class _Placed:
    """A step of the whole graph with the move of the folded step ``n``, in its own names."""

    def __init__(self, node: Node, problem: Problem, found: Found, n: int) -> None:
        self.node, self.problem, self.move = node, problem, found.moves[n]
        self.inputs = node.inputs
        self.values = problem.choices.values[n]  # of the folded step, per input
        self.given = tuple(r if r is None else problem.ids[r] for r in problem.steps[n].results)

    @property
    def loads(self) -> list[tuple[str, int]]:
        loaded = dict(self.move.loads)
        names = zip(self.inputs, self.values)
        return [(name, loaded[value]) for name, value in dict.fromkeys(names) if value in loaded]

    @property
    def needs(self) -> list[tuple[str, int, int]]:
        """Names with the values of the folded step and the codes in which they are needed."""
        names = dict(zip(self.values, self.inputs))
        return [(names[value], value, code) for value, code in self.move.option.needs]

    def placements(self) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
        """Of the inputs and the results."""
        option, problem = self.move.option, self.problem
        strategy = option.strategy
        codes = [R] if strategy is None else [code_of(p) for p in strategy.inputs]
        gives = dict(option.gives)
        inputs = tuple(problem.placement(value, code) for value, code in zip(self.values, codes))
        outputs = tuple(
            problem.placement(value, gives[value])
            if value is not None
            else unused_placement(self, k, strategy.outputs[k], gives)
            for k, value in enumerate(self.given)
        )
        return inputs, outputs


def ensure(builder: Builder, problem: Problem, name: str, value: int, code: int) -> None:
    """Makes ``name`` held as ``code``, at the least price from what it is held as."""
    placement = problem.placement(value, code)
    held = builder.held[name]
    if placement in held:
        return
    prices = {src: problem.convert(value, code_of(src), code) for src in held}
    src = min((src for src, price in prices.items() if price is not None), key=lambda p: sum(prices[p]))
    builder.convert(name, src, placement)


def unused_placement(placed: _Placed, n: int, bare: Placement, gives: dict[int, int]) -> Placement:
    """The placement of a result that nobody uses: cut as its sibling of the same shape is."""
    for value, t in zip(placed.given, placed.node.types):
        if value is not None and isinstance(bare, Shard) and t.shape == placed.node.types[n].shape:
            sibling = placed.problem.placement(value, gives[value])
            if isinstance(sibling, Shard) and sibling.dim == bare.dim:
                return sibling
    return bare
