"""Carries the planned program over to a batch of another shape, with the same placements.

The model was traced for the new shape. If the trace has the planned operators under their planned names, the
new program has the planned placements, ratios, order and attributes, and the new shapes and arguments. Sizes
of pieces follow from the ratios and are rounded again. Two checks follow: the result computes exactly the new
graph, and it is a valid program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...errors import PlanError, VerificationError
from ...lang.check import check_program
from ...lang.ir import (
    Graph,
    Instruction,
    Node,
    Program,
    Ref,
    Shard,
    TensorType,
    ValueType,
    map_arguments,
    with_inputs,
)
from ...lang.rules import RULES, call_of, fill_in_units, find_strategy, shard_units
from ..batches import dealt_type
from ..layout import layout
from ..model_check import digest

DROPOUT = "aten.native_dropout"  # may be absent if a module evaluates; the executor then skips it


class CannotCarry(PlanError):
    """The new graph has other operators than the planned program."""


def carry(planned: Program, graph: Graph, *, as_dealt: bool = False) -> Program:
    """Adapts ``planned`` to the shapes of ``graph``. Raises CannotCarry if the graph has other operators, if
    the placements do not fit its shapes, or with ``as_dealt`` if ranks would have other rows than loaders
    deal out."""
    carried = _Carrier(planned, graph).program()
    if as_dealt:
        _check_rows(planned, carried)
    if digest(_without_passed(carried, graph)) != digest(graph):
        raise CannotCarry(
            "the model computes something else now",
            expected=f"the {len(planned.graph.nodes)} planned operators, for other sizes and numbers",
            got=f"{len(graph.nodes)} operators",
        )
    try:
        check_program(carried)
    except VerificationError as error:
        raise CannotCarry(
            error.message, expected=error.expected, got=error.got, where=error.where, hint=error.hint
        ) from None
    return carried


def _check_rows(planned: Program, carried: Program) -> None:
    for before, now in zip(planned.batch_inputs, carried.batch_inputs):
        dealt, wanted = layout(carried, dealt_type(before, now.type.value.shape)), layout(carried, now.type)
        if dealt.sizes != wanted.sizes:
            raise CannotCarry(
                "the model takes its rows in other units than planned",
                expected=f"{', '.join(map(str, wanted.sizes))} rows by rank",
                got=f"{', '.join(map(str, dealt.sizes))} rows by rank",
            )


class _Carrier:
    def __init__(self, planned: Program, graph: Graph) -> None:
        self.planned, self.graph = planned, graph
        self.values: dict[str, ValueType] = {}
        self.logical: dict[str, str] = {}  # for each name in the program, the name in the graph
        self._units: Mapping[str, tuple[int, ...]] | None = None
        self._of_batch: set[str | None] = set()  # values that depend on the batch

    def program(self) -> Program:
        instructions = tuple(map(self.instruction, self.planned.instructions))
        return replace(self.planned, instructions=instructions)

    def instruction(self, i: Instruction) -> Instruction:
        if i.is_sink:
            return i
        if i.op == "input" or not self._of_batch.isdisjoint(i.inputs):
            self._of_batch.update(i.results)
        if i.is_redistribution or self._is_passed(i):
            (source, *_) = i.inputs
            self._know(i, [self.values[source]] * len(i.results), [self.logical[source]] * len(i.results))
            types = tuple(self._type(r, t) for r, t in zip(i.results, i.types))
            return replace(i, types=types, args=i.args if i.is_redistribution else (*i.args[:2], False))
        node = self._node(i)
        self._know(i, node.types, node.results if i.is_leaf else i.results)
        args, kwargs = with_inputs(node.args, node.kwargs, i.inputs)
        types = tuple(
            replace(t, value=value) if i.op == "param" else self._placed(r, t, value)
            for r, t, value in zip(i.results, i.types, node.types)
        )
        if None in i.results:
            types = self._with_units(i, node, types)
        return replace(i, types=types, args=args, kwargs=kwargs)

    def _with_units(
        self, i: Instruction, node: Node, types: tuple[TensorType, ...]
    ) -> tuple[TensorType, ...]:
        """``types`` where unused results, which have no units of their own, get those of the call."""
        rule, before = RULES.get(i.op), [self.planned.types[n] for n in i.inputs]
        if rule is None:
            return types
        held, gives = (tuple(t.placement for t in each) for each in (before, i.types))
        strategy = find_strategy(rule, call_of(i, self.planned.types), held, gives)
        assert strategy is not None  # the planned program is valid
        now = tuple(self._type(n, t).placement for n, t in zip(i.inputs, before))
        named = [None if r is None else t.placement for r, t in zip(i.results, types)]
        placed = fill_in_units(rule, call_of(node, self.graph.types), strategy, now, named)
        return tuple(replace(t, placement=p) for t, p in zip(types, placed))

    def _is_passed(self, i: Instruction) -> bool:
        return i.op == DROPOUT and i.results[0] not in self.graph.producers

    def _node(self, i: Instruction) -> Node:
        """The node of the graph to which an instruction corresponds."""
        name = next((r for r in i.results if r is not None), "")
        node = self.graph.producers.get(name)
        if i.is_leaf and node is None:
            node = next((n for n in self.graph.nodes if (n.op, n.args) == (i.op, i.args)), None)
            if node is None and i.op == "param":  # not used for this shape
                return Node(i.results, tuple(t.value for t in i.types), i.op, i.args, i.kwargs)
        if node is None or node.op != i.op or len(node.types) != len(i.types):
            raise self._other(i, node)
        if [self.logical[n] for n in i.inputs] != list(node.inputs):
            raise self._other(i, node)
        return node

    def _know(self, i: Instruction, values, names) -> None:
        for result, value, name in zip(i.results, values, names):
            if result is not None:
                self.values[result], self.logical[result] = value, name

    def _type(self, result: str | None, t: TensorType) -> TensorType:
        return t if result is None else self._placed(result, t, self.values[result])

    def _placed(self, result: str | None, t: TensorType, value: ValueType) -> TensorType:
        placement = t.placement
        # 8 rows of 4 words are as many as 16 of 2: a value may keep its shape, and be of other rows
        may_differ = result in self._of_batch or value != t.value
        if isinstance(placement, Shard) and placement.unit > 1 and may_differ:
            if len(value.shape) != len(t.value.shape):
                raise CannotCarry("a value has another number of dims", expected=str(t), got=str(value))
            placement = replace(placement, unit=self._unit(result, placement, value))
        return TensorType(value, placement, t.ratio)

    def _unit(self, result: str | None, placement: Shard, value: ValueType) -> int:
        if result is None:  # follows from those of its call
            return 1
        if self._units is None:
            self._units = shard_units(self.graph, RULES)
        units = self._units.get(self.logical.get(result, ""))
        unit = placement.unit if units is None else units[placement.dim]
        if value.shape[placement.dim] % unit:
            raise CannotCarry(
                "a value cannot be cut as planned", expected=str(placement), got=f"{value}, units of {unit}"
            )
        return unit

    def _other(self, i: Instruction, node: Node | None) -> CannotCarry:
        place = f" of {i.location}" if i.location else ""
        return CannotCarry(
            "the model has other operators now",
            expected=f"{i.op}, as planned",
            got=f"no {i.op}{place}" if node is None else f"{node.op}({', '.join(map(str, node.args))})",
            where=i.location or (node.location if node is not None else ""),
        )


def _without_passed(made: Program, graph: Graph) -> Graph:
    """The graph of a program, without any dropout that ``graph`` does not have."""
    alias: dict[str, Ref] = {}

    def follow(ref: Ref) -> Ref:
        return alias.get(ref.name, ref)

    nodes: list[Node] = []
    for node in made.graph.nodes:
        args, kwargs = map_arguments(node.args, node.kwargs, follow)
        if node.op == DROPOUT and node.results[0] not in graph.producers:
            if node.results[0] is not None:
                alias[node.results[0]] = args[0]
            continue
        nodes.append(replace(node, args=args, kwargs=kwargs))
    loss = follow(Ref(made.graph.loss)).name
    return Graph(made.graph.name, tuple(nodes), loss)
