"""Plain data parallelism for any graph of a model, on parameters held as in a plan.

It serves if the planned program cannot be carried over (a model that evaluates has other operators). Samples
are cut as planned, parameters are gathered where they are used, and every operator runs on its values as they
are held, or on whole values if its rule allows nothing else. This is right for every graph, and as fast as
FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...lang.check import check_program
from ...lang.ir import (
    PARTIAL,
    REPLICATE,
    Arg,
    Graph,
    Instruction,
    Node,
    Partial,
    Placement,
    Program,
    Ref,
    Replicate,
    Shard,
    TensorType,
    ValueType,
    participants,
    redistribution,
    support,
    with_inputs,
    with_rows_as_dealt,
)
from ...lang.rules import RULES, Strategy, call_of, fill_in_units, shard_units, strategies


def lower(graph: Graph, planned: Program) -> Program:
    """The program of ``graph`` on the ranks of the planned program. Raises VerificationError if the checker
    refuses it."""
    lowered = _Lowering(graph, planned).program()
    check_program(lowered)
    return lowered


class _Lowering:
    def __init__(self, graph: Graph, planned: Program) -> None:
        self.graph, self.planned = graph, planned
        self.inputs = {i.args[0]: i for i in planned.batch_inputs}
        self.params: dict[str, Instruction] = {}
        for i in planned.instructions:
            if i.op in ("param", "buffer"):
                self.params.setdefault(i.args[0], i)
        cut = (i.type.ratio for i in self.inputs.values() if isinstance(i.type.placement, Shard))
        named = (i.type.ratio for i in self.inputs.values() if i.type.ratio is not None)
        self.ratio = next(cut, None) or next(named, None)  # the ratio of the ranks that compute
        self.units = shard_units(graph, RULES)
        self.used = {name for node in graph.nodes for name in node.inputs}
        self.instructions: list[Instruction] = []
        self.held: dict[str, dict[Placement, str]] = {}  # values held on the ranks that compute
        self.types: dict[str, TensorType] = {}

    def program(self) -> Program:
        for node in self.graph.nodes:
            if node.is_leaf:
                self.leaf(node)
            elif node.op == "update":
                self.update(node)
            elif node.op == "output":
                self.output(node)
            else:
                self.operator(node)
        loss = self.convert(self.graph.loss, PARTIAL)
        lowered = replace(self.planned, instructions=tuple(self.instructions), loss=loss)
        return with_rows_as_dealt(lowered)

    def leaf(self, node: Node) -> None:
        value = node.types[0]
        leaf_of = self.inputs.get(node.args[0]) if node.op == "input" else self.params.get(str(node.args[0]))
        attrs: tuple[tuple[str, Arg], ...] = ()
        if node.op == "const" or leaf_of is None:
            t = TensorType(value)
        else:
            t, attrs = replace(leaf_of.type, value=value), leaf_of.attrs
        if isinstance(t.placement, Shard):
            t = replace(t, placement=t.placement.dealt(value.shape[t.placement.dim]))
        self._append((node.result,), (t,), node.op, node.args, node.kwargs, attrs, node.location)
        if node.result not in self.used:
            return
        here = self._type(value, t.placement)
        if isinstance(t.placement, Shard) and (node.op != "input" or t.ratio != self.ratio):
            here = self._type(value, REPLICATE)
            self.held[node.result] = {REPLICATE: self._move(node.result, here)}
        elif self._ranks(t) != self._ranks(here):
            self.held[node.result] = {here.placement: self._move(node.result, here)}
        else:
            self.held[node.result] = {here.placement: node.result}

    def update(self, node: Node) -> None:
        """Adds the update of a buffer on all ranks that hold it."""
        name = self.convert(node.inputs[0], REPLICATE)
        held = self.params.get(str(node.args[0]))
        t = TensorType(self.types[name].value) if held is None else held.type
        if self._ranks(t) != self._ranks(self.types[name]):
            name = self._move(node.inputs[0], replace(t, value=self.types[name].value), name)
        self._append((), (), "update", (node.args[0], Ref(name)), (), (), node.location)

    def output(self, node: Node) -> None:
        """Adds an output: its rows as they are held if it is cut along dim 0, and otherwise the whole
        value."""
        held = self.held[node.inputs[0]]
        cut = next((name for p, name in held.items() if isinstance(p, Shard) and p.dim == 0), "")
        name = cut or self.convert(node.inputs[0], REPLICATE)
        self._append((), (), "output", (node.args[0], Ref(name)), node.kwargs, (), node.location)

    def operator(self, node: Node) -> None:
        rule = RULES.get(node.op)
        whole = Strategy("", (REPLICATE,) * len(node.inputs), (REPLICATE,) * len(node.results))
        options = [whole] if rule is None else strategies(rule, call_of(node, self.graph.types))
        best = min(options, key=lambda option: self.cost(node, option))
        needs = tuple(self._placed(n, p) for n, p in zip(node.inputs, best.inputs))
        names = [self.convert(n, p) for n, p in zip(node.inputs, needs)]
        args, kwargs = with_inputs(node.args, node.kwargs, names)
        gives = [None if r is None else self._placed(r, p) for r, p in zip(node.results, best.outputs)]
        call = call_of(node, self.graph.types)
        placed = fill_in_units(rule, call, best, needs, gives)  # unused results have no units of their own
        types = tuple(self._type(t, p) for t, p in zip(node.types, placed))
        self._append(node.results, types, node.op, args, kwargs, (), node.location)
        for name, t in zip(node.results, types):
            if name is not None:
                self.held[name] = {t.placement: name}

    def cost(self, node: Node, option: Strategy) -> tuple[float, int, bool]:
        """The bytes that move for an option, the conversions that it needs, and whether it is whole."""
        moved, count = 0.0, 0
        results = zip(node.results, option.outputs)
        for name, bare in [*zip(node.inputs, option.inputs), *((r, p) for r, p in results if r is not None)]:
            if isinstance(bare, Shard) and not self._can_cut(name, bare.dim):
                return float("inf"), 0, True
        for name, bare in zip(node.inputs, option.inputs):
            wanted = self._placed(name, bare)
            if wanted in self.held[name]:
                continue
            count += 1
            free = REPLICATE in self.held[name] and not isinstance(wanted, Partial)
            moved += 0 if free else self.graph.types[name].size_bytes
        return moved, count, not option.is_sharded

    def convert(self, value: str, wanted: Placement) -> str:
        """``value`` held as wanted, by one redistribution or two."""
        held = self.held[value]
        if wanted in held:
            return held[wanted]
        source = REPLICATE if REPLICATE in held else next(iter(held))
        if isinstance(source, Partial | Shard) and not isinstance(wanted, Replicate):
            self.convert(value, REPLICATE)  # sums, and values cut along another dim, are first made whole
            source = REPLICATE
        t = self._type(self.graph.types[value], wanted)
        name = self._fresh(value, wanted)
        op = redistribution(source, wanted)
        self._append((name,), (t,), op, (Ref(held[source]),), (), (), "")
        held[wanted] = name
        return name

    def _move(self, value: str, t: TensorType, source: str = "") -> str:
        """A leaf on the ranks that compute, held as ``t``."""
        source = source or value
        name = self._fresh(value, t.placement)
        before = self.types[source]
        gathers = isinstance(before.placement, Shard) and isinstance(t.placement, Replicate)
        op = "all_gather" if gathers else "move"
        self._append((name,), (t,), op, (Ref(source),), (), (), "")
        return name

    def _append(self, results, types, op, args, kwargs, attrs, location) -> None:
        self.instructions.append(Instruction(results, tuple(types), op, args, kwargs, attrs, location))
        self.types.update((r, t) for r, t in zip(results, types) if r is not None)

    def _fresh(self, value: str, placement: Placement) -> str:
        stem = f"{value}.{'s' if isinstance(placement, Shard) else str(placement)[0].lower()}"
        used_names: Iterable[str] = self.types.keys() | self.graph.types.keys()
        name, count = stem, 1
        while name in used_names:
            count += 1
            name = f"{stem}{count}"
        return name

    def _type(self, value: ValueType, placement: Placement) -> TensorType:
        is_everyone = self.ratio is None or all(self.planned.ratio_of[self.ratio])
        bare = is_everyone and not isinstance(placement, Shard)
        return TensorType(value, placement, None if bare else self.ratio)

    def _ranks(self, t: TensorType) -> tuple[int, ...]:
        ratio: Mapping = self.planned.ratio_of
        return participants(None, self.planned.world_size) if t.ratio is None else support(ratio[t.ratio])

    def _placed(self, name: str, bare: Placement) -> Placement:
        return Shard(bare.dim, self._unit(name, bare.dim)) if isinstance(bare, Shard) else bare

    def _unit(self, name: str, dim: int) -> int:
        return self.units[name][dim]

    def _can_cut(self, name: str, dim: int) -> bool:
        """Whether a dim can be cut: it cannot without a ratio, nor if its unit is the whole dim, which marks
        dims without a common unit."""
        size = self.graph.types[name].shape[dim]
        return self.ratio is not None and (self._unit(name, dim) < size or size <= 1)
