"""Turns a path of the search into a program: instructions with placed types, in order."""

from __future__ import annotations

from ...lang.ir import (
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
    ValueType,
    redistribution,
    with_inputs,
    with_rows_as_dealt,
)
from ...lang.ir.samples import draws_numbers
from ...lang.rules import call_of, fill_in_units
from .choices import R, code_of
from .problem import Problem
from .search import Found


class Builder:
    """Collects the instructions of one program over one ratio; conversions are made once and reused."""

    def __init__(self, graph: Graph, ratio: Ratio, *, named: bool = False) -> None:
        """With ``named``, every type names its ratio, even if it does not matter."""
        self.graph = graph
        self.ratio_name, self.named = "r0", named
        self.ratios: dict[str, Ratio] = {self.ratio_name: ratio}
        self._everyone: dict[str, bool] = {}
        self._placed: dict[tuple[ValueType, Placement, str], TensorType] = {}
        self.instructions: list[Instruction] = []
        self.types: dict[str, TensorType] = {}
        self.held: dict[str, dict[Placement, str]] = {}  # logical value -> placement -> value that holds it

    def type(self, name: str, placement: Placement, ratio_name: str | None = None) -> TensorType:
        """The type of a logical value held as ``placement``; it names a ratio only if that matters."""
        return self.placed(self.graph.types[name], placement, ratio_name)

    def placed(self, value: ValueType, placement: Placement, ratio_name: str | None = None) -> TensorType:
        key = (value, placement, ratio_name or self.ratio_name)
        if key not in self._placed:
            named = self.named or isinstance(placement, Shard) or not self.has_everyone(key[2])
            self._placed[key] = TensorType(value, placement, key[2] if named else None)
        return self._placed[key]

    def has_everyone(self, ratio_name: str) -> bool:
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
        """``value`` held as ``dst``, made from its ``src`` form if it is not yet held like that."""
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

    def node(
        self,
        node: Node,
        inputs: tuple[Placement, ...],
        types: tuple[TensorType, ...],
        like: Node,
    ) -> None:
        """Adds an operator whose inputs are already held as ``inputs``, with the types of its results;
        ``like`` is an operator that differs only in the names of values."""
        operands = tuple([self.held[n][p] for n, p in zip(node.inputs, inputs)])
        args, kwargs = node.args, node.kwargs
        if operands != node.inputs:
            args, kwargs = with_inputs(args, kwargs, operands)
        for name, t in zip(node.results, types):
            if name is not None:
                self.held[name] = {t.placement: name}
        instruction = Instruction(node.results, types, node.op, args, kwargs, location=node.location)
        Instruction.plain.give(instruction, like.plain)  # the same object, which identifies repeated layers
        self.append(instruction)

    def finish(self) -> Program:
        """The program; the loss is turned into a partial sum if it is held otherwise."""
        loss = self.graph.loss
        self.instructions = hidden_first(self.instructions, self.graph)
        if PARTIAL not in self.held[loss]:
            self.convert(loss, next(iter(self.held[loss])), PARTIAL)
        return with_rows_as_dealt(
            Program(
                self.graph.name,
                len(next(iter(self.ratios.values()))),
                tuple(self.ratios.items()),
                tuple(self.instructions),
                self.held[loss][PARTIAL],
            )
        )


def hidden_first(instructions: list[Instruction], graph: Graph) -> list[Instruction]:
    """Moves communication that passes no gradient and depends only on the batch (a count of labels) to the
    front, with everything it depends on, so that it overlaps with the forward pass."""
    source = {r: n for n, i in enumerate(instructions) for r in i.results if r is not None}
    bound: set[str] = set()  # values that parameters, random numbers or gradients tie to their place
    first: set[int] = set()
    for n, i in enumerate(instructions):
        if (
            any(r in graph.requires_grad for r in i.results)
            or i.op in ("param", "buffer")
            or not bound.isdisjoint(i.inputs)
            or draws_numbers(i.op)
        ):
            bound.update(r for r in i.results if r is not None)
        elif i.op in COLLECTIVE_OPS:
            waiting = [n]
            while waiting:
                this = waiting.pop()
                if this not in first:
                    first.add(this)
                    waiting += [source[name] for name in instructions[this].inputs]
    if not first:
        return instructions
    later = [i for n, i in enumerate(instructions) if n not in first]
    return [instructions[n] for n in sorted(first)] + later


COLLECTIVE_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def emit(problem: Problem, found: Found, *, named: bool = False) -> Program:
    """The program of a path found by the search, over the whole graph: a folded step uses the move of the
    kept step that represents it. ``named``: all types name the ratio, so that the instructions are the same
    for any ranks."""
    fold = problem.choices.fold
    builder = Builder(fold.whole, problem.ratio, named=named)
    nodes = [n for n in fold.whole.nodes if not n.is_leaf]
    leaves = {n.result: n for n in fold.whole.nodes if n.is_leaf}
    placed = [_Placed(builder, problem, found, n) for n in range(len(problem.steps))]
    path = [(node, placed[n]) for node, n in zip(nodes, fold.origins)]
    used = {name for node, _ in path for name in node.inputs}
    for node in fold.whole.params:
        if node.result not in used:
            builder.leaf(node, REPLICATE)
    loads: dict[str, int] = {}  # whole if steps load a leaf in several ways
    for node, move in path:
        for position, code in move.loads:
            name = node.inputs[position]
            loads[name] = code if loads.get(name, code) == code else R
    for node, move in path:
        for position, value, code, placement in move.needs:
            name = node.inputs[position]
            held = builder.held.get(name)
            if held is None:
                builder.leaf(leaves[name], problem.placement(value, loads.get(name, code)))
                held = builder.held[name]
            if placement not in held:
                ensure(builder, problem, name, value, code)
        builder.node(node, move.inputs, move.types, move.step)
    return builder.finish()


class _Placed:
    """The move of the folded step ``n``, in a form that fits every step that it represents: which inputs are
    loaded and how they are needed, by position, and the placements of inputs and results."""

    def __init__(self, builder: Builder, problem: Problem, found: Found, n: int) -> None:
        node, values, move = problem.steps[n], problem.choices.values[n], found.moves[n]
        self.step = node
        result_ids = tuple(r if r is None else problem.ids[r] for r in node.results)
        at = {value: position for position, value in enumerate(values)}
        self.loads = tuple((at[value], code) for value, code in move.loads)
        self.needs = tuple(
            (at[value], value, code, problem.placement(value, code)) for value, code in move.option.needs
        )
        strategy = move.option.strategy
        needs = [code for _, code in move.option.needs]
        codes = needs if strategy is None else [code_of(p) for p in strategy.inputs]
        self.inputs = tuple(problem.placement(value, code) for value, code in zip(values, codes))
        gives = dict(move.option.gives)
        named = [None if value is None else problem.placement(value, gives[value]) for value in result_ids]
        if strategy is not None and None in named:  # unused results have no units
            call = call_of(node, problem.choices.graph.types)
            placed = fill_in_units(problem.choices.rules.get(node.op), call, strategy, self.inputs, named)
        else:
            placed = [placement for placement in named if placement is not None]
        self.types = tuple(builder.placed(t, p) for t, p in zip(node.types, placed))


def ensure(builder: Builder, problem: Problem, name: str, value: int, code: int) -> None:
    """Makes ``name`` held as ``code``, from the existing placement with the lowest price."""
    prices = {src: problem.convert(value, code_of(src), code) for src in builder.held[name]}
    sums_s = {src: sum(price) for src, price in prices.items() if price is not None}
    src = min(sums_s, key=sums_s.__getitem__)
    builder.convert(name, src, problem.placement(value, code))
