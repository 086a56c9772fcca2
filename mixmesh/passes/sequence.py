"""Sequence parallelism: values that tensor parallelism replicates are cut along the sequence instead.

Between the products that tensor parallelism cuts, every rank computes the same norms, dropout and residual
additions. In Megatron-LM (Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4.2) each all-reduce before them becomes a reduce-scatter along the sequence, and an
all-gather comes before the next product: together they move as many bytes, and a rank computes and keeps only
its own rows in between. Here rows are divided by the program's ratio, and the rules of the operators say
which operators can be cut. The backward pass follows by duality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..lang.ir import (
    PARTIAL,
    REPLICATE,
    Instruction,
    Placement,
    Program,
    Ref,
    Shard,
    TensorType,
    redistribution,
    regions,
    with_inputs,
)
from ..lang.rules import RULES, Strategy, call_of, strategies
from ..lang.rules.pattern import Bound


@dataclass(frozen=True)
class Cut:
    """A way to cut an operator: the placements of its inputs and its results, by position."""

    inputs: tuple[Placement, ...]
    results: tuple[Placement, ...]


def sequence_parallel(program: Program) -> Program:
    """``program`` with replicated operators after all-reduces of activations cut along the sequence;
    unchanged if there are none. Programs with rematerialised regions stay unchanged, because collectives
    cannot run again."""
    reduced = {i.result: i for i in program.instructions if is_reduced(program, i)}
    if not reduced or regions(program):
        return program
    operators = without_costly_ends(program, cut_operators(program, reduced))
    return replace(program, instructions=tuple(_Rewrite(program, operators).emit())) if operators else program


def is_reduced(program: Program, i: Instruction) -> bool:
    """Whether ``i`` all-reduces an activation with enough rows for all participating ranks."""
    if i.op != "all_reduce" or len(i.type.value.shape) < 2 or i.result not in program.requires_grad:
        return False
    num_rows = i.type.value.shape[-2]
    return ratio_name(program, i.type) is not None and num_rows >= len(program.participants(i.type)) > 1


def ratio_name(program: Program, t: TensorType) -> str | None:
    """The ratio that would cut a value of this type: its own, or the first one in which every rank takes
    part; None if there is none."""
    everyone = (name for name, ratio in program.ratios if all(share > 0 for share in ratio))
    return t.ratio or next(everyone, None)


def cut_operators(program: Program, reduced: Mapping[str, Instruction]) -> dict[int, Cut]:
    """The replicated operators, by index, that can be cut if the ``reduced`` values are cut by rows, with
    their placements then."""
    cut: dict[str, Placement] = {name: Shard(len(i.type.value.shape) - 2) for name, i in reduced.items()}
    ways: dict[tuple, Cut | None] = {}  # repeated layers have equal calls
    operators: dict[int, Cut] = {}
    for n, i in enumerate(program.instructions):
        if not is_replicated(program, i) or cut.keys().isdisjoint(i.inputs):
            continue
        held = tuple([cut.get(name) for name in i.inputs])
        key = i.plain, i.types, tuple([program.types[name] for name in i.inputs]), held
        if key not in ways:
            ways[key] = way_of(program, i, held)
        if (way := ways[key]) is not None:
            operators[n] = way
            cut |= {r: p for r, p in zip(i.results, way.results) if r is not None}
    return operators


def is_replicated(program: Program, i: Instruction) -> bool:
    """Whether all ranks of a ratio compute ``i`` alike, and it has no attributes."""
    if i.is_leaf or i.is_sink or i.is_redistribution or i.attrs:
        return False
    types = [*i.types, *(program.types[name] for name in i.inputs)]
    ratios = {ratio_name(program, t) for t in types}
    return len(ratios) == 1 and all(t.placement == REPLICATE for t in types)


def way_of(program: Program, i: Instruction, held: tuple[Placement | None, ...]) -> Cut | None:
    """The placements of ``i`` if its inputs are ``held`` like this, None standing for one still whole. None
    if it cannot be computed like that, or if not all of its results are then cut."""
    rule = RULES.get(i.op)
    if rule is None:
        return None
    call = call_of(i, program.types)
    for strategy in strategies(rule, call):
        if not fits(strategy, held):
            continue
        bound = rule.bound(call)
        pieces = [(dims, p) for dims, p in zip(bound.inputs, held) if isinstance(p, Shard)]
        steps = {p.unit / bound.trailing(dims[p.dim]) for dims, p in pieces}
        if len(steps) == 1 and (step := steps.pop()).is_integer():
            inputs = placed(bound, bound.inputs, strategy.inputs, int(step))
            return Cut(inputs, placed(bound, bound.outputs, strategy.outputs, int(step)))
    return None


def placed(
    bound: Bound, terms: Iterable[tuple], bare: Iterable[Placement], step: int
) -> tuple[Placement, ...]:
    """The placements of tensors with their units: ``step`` elements of the cut factor stay together."""
    return tuple(
        [
            replace(p, unit=step * bound.trailing(dims[p.dim])) if isinstance(p, Shard) else p
            for dims, p in zip(terms, bare)
        ]
    )


def is_cut(placement: Placement | None) -> bool:
    return isinstance(placement, Shard)


def fits(strategy: Strategy, held: tuple[Placement | None, ...]) -> bool:
    """Whether a strategy takes inputs as ``held`` and cuts all results."""
    return (
        strategy.is_sharded
        and all(map(is_cut, strategy.outputs))
        and PARTIAL not in strategy.inputs
        and all(
            isinstance(p, Shard) and p.dim == h.dim
            for p, h in zip(strategy.inputs, held)
            if isinstance(h, Shard)
        )
    )


def without_costly_ends(program: Program, operators: Mapping[int, Cut]) -> dict[int, Cut]:
    """The operators without those whose gathered results would be larger than the inputs gathered instead."""
    kept = dict(operators)
    results_of_kept = {r for n in kept for r in program.instructions[n].results}
    outside = {
        name
        for n, i in enumerate(program.instructions)
        if n not in kept
        for name in i.inputs
        if name in results_of_kept
    }

    def size_bytes(names: Iterable[str]) -> int:
        return sum(program.types[name].value.size_bytes for name in names)

    for n in sorted(kept, reverse=True):
        i = program.instructions[n]
        gathered = outside.intersection(i.results)
        instead = {name for name, p in zip(i.inputs, kept[n].inputs) if is_cut(p)} - outside
        if len(gathered) == len({*i.results}) and size_bytes(gathered) > size_bytes(instead):
            del kept[n]
            outside.update(i.inputs)
    return kept


class _Rewrite:
    """One program in which ``operators`` are cut."""

    def __init__(self, program: Program, operators: Mapping[int, Cut]) -> None:
        self.program, self.operators = program, operators
        self.used = {*program.types}
        self.made = {r for n in operators for r in program.instructions[n].results}
        # for each value, the placements in which it is used
        self.wanted: dict[str, dict[Placement, None]] = {}
        for n, i in enumerate(program.instructions):
            placements = operators[n].inputs if n in operators else (self.taken(i),) * len(i.inputs)
            for name, p in zip(i.inputs, placements):
                self.wanted.setdefault(name, {})[p] = None
        self.held: dict[tuple[str, Placement], str] = {}  # names of values in further placements
        self.pieces: dict[str, TensorType] = {}  # the types of the operators' results

    def taken(self, i: Instruction) -> Placement:
        """The placement in which an instruction outside of the operators takes its inputs. A slice of an
        operator's result takes it in the slice's own placement, so that pieces go from rank to rank."""
        if i.op != "local_slice" or i.inputs[0] not in self.made:
            return REPLICATE
        is_alike = i.type.ratio == ratio_name(self.program, self.program.types[i.inputs[0]])
        return i.type.placement if is_alike else REPLICATE

    def emit(self) -> Iterator[Instruction]:
        for n, i in enumerate(self.program.instructions):
            if n in self.operators:
                yield from self.operator(i, self.operators[n])
            elif self.is_entry(i):
                yield from self.entry(i)
            elif is_cut(self.taken(i)):
                yield from self.recut(i)
            else:
                yield using(i, [self.held.get((name, REPLICATE), name) for name in i.inputs])

    def operator(self, i: Instruction, way: Cut) -> Iterator[Instruction]:
        """Yields the slices of inputs that are whole, the operator on pieces, and the gathers of results for
        users that need them whole."""
        for name, p in zip(i.inputs, way.inputs):
            if isinstance(p, Shard) and name not in self.made and (name, p) not in self.held:
                yield self.held_as(name, self.program.types[name], p)
        names = [self.held.get((name, p), name) for name, p in zip(i.inputs, way.inputs)]
        types = tuple([self.placed(t, p) for t, p in zip(i.types, way.results)])
        yield replace(using(i, names), types=types)
        for result, t in zip(i.results, types):
            if result is not None:
                self.pieces[result] = t
                if REPLICATE in self.wanted.get(result, ()):
                    yield replace(self.held_as(result, t, REPLICATE), types=(self.program.types[result],))

    def is_entry(self, i: Instruction) -> bool:
        """Whether a redistribution provides an input that operators take in pieces, and can provide the
        pieces directly."""
        if not i.is_redistribution or i.type.placement != REPLICATE or i.result in self.made:
            return False
        t, wanted = self.program.types[i.inputs[0]], self.wanted.get(i.result, {})
        if sum(map(is_cut, wanted)) != 1 or i.op == "move":
            return False
        if t.placement == PARTIAL:
            return True
        is_activation = not self.program.producers[i.inputs[0]].is_leaf
        return is_activation and len(wanted) == 1 and t.ratio == ratio_name(self.program, i.type)

    def entry(self, i: Instruction) -> Iterator[Instruction]:
        """The pieces of a value, from which it is gathered if other instructions use it."""
        source = i.inputs[0]
        t = self.program.types[source]
        (p,) = (p for p in self.wanted[i.result] if isinstance(p, Shard))
        if t.placement == p:
            self.held[i.result, p] = source
            return
        pieces = self.held_as(source, t, p, i.result)
        yield pieces
        self.held[i.result, p] = pieces.result
        if REPLICATE in self.wanted[i.result]:
            yield Instruction(i.results, i.types, "all_gather", (Ref(pieces.result),))

    def recut(self, i: Instruction) -> Iterator[Instruction]:
        """A slice of an operator's result, which is already in pieces."""
        t = self.pieces[i.inputs[0]]
        if t.placement == i.type.placement:
            self.held[i.result, REPLICATE] = i.inputs[0]
        else:
            op = redistribution(t.placement, i.type.placement)
            yield Instruction(i.results, i.types, op, (Ref(i.inputs[0]),))

    def held_as(self, name: str, t: TensorType, p: Placement, value: str = "") -> Instruction:
        """The name of ``name``, of type ``t``, held as ``p``: a form of ``value``, if it is a form of another
        value."""
        suffix = f"s{p.dim}" if isinstance(p, Shard) else "r"
        stem = f"{(value or name).removesuffix('.r')}.{suffix}"
        result, count = stem, 1
        while result in self.used:
            count += 1
            result = f"{stem}{count}"
        self.used.add(result)
        self.held[name, p] = result
        op = redistribution(t.placement, p)
        return Instruction((result,), (self.placed(t, p),), op, (Ref(name),))

    def placed(self, t: TensorType, p: Placement) -> TensorType:
        """The type held as ``p`` under the ratio that it names, or under the one that would cut it."""
        ratio = ratio_name(self.program, t) if isinstance(p, Shard) else t.ratio
        return TensorType(t.value, p, ratio)


def using(i: Instruction, inputs: Sequence[str]) -> Instruction:
    """``i`` with other inputs, by position."""
    if tuple(inputs) == i.inputs:
        return i
    args, kwargs = with_inputs(i.args, i.kwargs, inputs)
    return replace(i, args=args, kwargs=kwargs)
