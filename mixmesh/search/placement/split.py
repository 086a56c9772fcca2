"""Splits a program of several sets of ranks into the programs that were joined: the way back from
``join``."""

from __future__ import annotations

from dataclasses import replace

from ...lang.ir import (
    Instruction,
    Partial,
    Program,
    Ratio,
    Ref,
    TensorType,
    ValueType,
    map_arguments,
)
from .join import GATHERED, PADDED, SAMPLES, WHOLE, Set
from .part import Cut, Part, output_key
from .sets import SHARED, Member, SetScope, members_of, scope_of


def split(program: Program) -> tuple[tuple[Set, ...], dict[str, ValueType]]:
    """The sets of a joined program, and the whole inputs by name, from which ``join`` makes a program that
    computes the same on the same ranks.

    Attributes that say how something is done are kept on a set's own instructions, and lost on those that
    join sets (buckets of shared parameters, algorithms of their collectives).
    """
    return _Splitting(program).sets(), {
        i.result: i.type.value for i in program.instructions if i.op == "input"
    }


class _Splitting:
    def __init__(self, program: Program) -> None:
        self.whole = program
        self.members = members_of(program)
        self.scopes = {name: scope for name, _ in program.ratios if (scope := scope_of(name)) is not None}
        self.sources: dict[str, dict[Member, str]] = {}  # for each sum over all sets, each set's addend
        for i in program.instructions:
            is_shared = i.op == "move" and i.type.ratio in (None, SHARED)
            if is_shared and isinstance(i.type.placement, Partial):
                member = self.member_of(i.inputs[0])
                self.sources.setdefault(member.own(i.result), {})[member] = member.own(i.inputs[0])
        self.out: dict[Member, list[Instruction]] = {member: [] for member in self.members}
        self.cuts: dict[Member, dict[str, Cut]] = {member: {} for member in self.members}
        self.drawn: dict[Member, dict[str, int]] = {member: {} for member in self.members}
        self.summed: dict[Member, set[str]] = {member: set() for member in self.members}

    def scope(self, t: TensorType) -> SetScope | None:
        """The scope of a type's ratio; None for a type that does not belong to a single set."""
        return None if t.ratio is None else self.scopes.get(t.ratio)

    def member_of(self, name: str) -> Member:
        """The set that holds a value."""
        scope = self.scope(self.whole.types[name])
        assert scope is not None  # called for values of one set
        return scope.member

    def sets(self) -> tuple[Set, ...]:
        for i in self.whole.instructions:
            if i.op == "output":
                self.output(i)
            elif i.op == "update":
                self.sink(i, i.inputs[0])
            elif i.types and (scope := self.scope(i.types[0])) is not None:
                self.instruction(scope.member, i)
        return tuple(map(self.set, self.members))

    def sink(self, i: Instruction, source: str) -> None:
        """Adds a sink to the set that holds ``source``."""
        member = self.member_of(source)
        self.out[member].append(replace(i, args=(i.args[0], Ref(member.own(source)))))

    def output(self, i: Instruction) -> None:
        """Gives an output back to the sets that hold rows of it, or to the one that holds all."""
        maker = self.whole.producers[i.inputs[0]]
        addends = self.sources.get(f"{i.args[0]}.addends")
        if addends is None:
            self.sink(i, maker.inputs[0])
            return
        for member, padded in addends.items():
            source = member.value(padded.removesuffix(PADDED))
            pad = self.whole.producers[member.value(padded)]
            value, start = self.whole.types[source].value, pad.args[1][-2]
            whole = pad.type.value.shape
            self.cuts[member][output_key(i.args[0])] = Cut(0, start, value.shape[0], whole)
            self.sink(i, source)

    def set(self, member: Member) -> Set:
        ratios: list[tuple[str, Ratio]] = []
        for name, scope in self.scopes.items():
            if scope.member == member and scope.own is not None:
                ratios.append((scope.own, self.whole.ratio_of[name]))
        whole, loss = self.whole, self.sources["loss.total"][member]
        program = Program(
            whole.name, whole.world_size, tuple(ratios), tuple(self.out[member]), loss, whole.dtypes
        )
        summed = frozenset(self.summed[member])
        return Set(Part(program.graph, self.cuts[member], summed, self.drawn[member]), program)

    def instruction(self, member: Member, i: Instruction) -> None:
        first = next(r for r in i.results if r is not None)
        if member.own(first).endswith((GATHERED, PADDED)):
            return  # part of an output's way to all ranks
        name = member.own(first.removesuffix(WHOLE).removesuffix(SAMPLES))
        leaf = self.whole.producers.get(name)
        if leaf is not None and leaf.is_leaf:
            self.leaf(member, i, name, leaf)
        elif f"{name}.total" in self.whole.producers and f"{name}.addends" in self.sources:
            if first == member.value(name):
                self.summed[member].add(name)
                args = (Ref(self.sources[f"{name}.addends"][member]), 1)
                self.out[member].append(Instruction((name,), (self.local(i.type),), "aten.mul.Tensor", args))
        else:
            self.out[member].append(self.of_set(member, i))

    def leaf(self, member: Member, i: Instruction, name: str, leaf: Instruction) -> None:
        """Turns the last instruction that brings an input or parameter to a set into a leaf."""
        if i.op == "aten.slice.Tensor":
            dim, start, stop = i.args[1:4]
            self.cuts[member][name] = Cut(dim, start, stop - start, leaf.type.value.shape)
        if i.result == member.value(name):
            self.out[member].append(replace(leaf, types=(self.local(i.type),), attrs=()))

    def of_set(self, member: Member, i: Instruction) -> Instruction:
        args, kwargs = map_arguments(i.args, i.kwargs, lambda ref: Ref(member.own(ref.name)))
        results = tuple(None if r is None else member.own(r) for r in i.results)
        drawn = i.attr("drawn") if i.attrs else None
        if drawn is not None:
            number, dim, start, *whole = drawn
            for r, t in zip(results, i.types):
                if r is not None:
                    self.drawn[member][r] = number
                    size = t.value.shape[dim] if t.value.shape else 0
                    self.cuts[member][r] = Cut(dim, start, size, tuple(whole))
        num_sets = len(self.members)
        kept = ((k, v) for k, v in i.attrs if k != "drawn")
        attrs = ((k, member.own_region(v, num_sets) if k == "recompute" else v) for k, v in kept)
        return replace(
            i,
            results=results,
            types=tuple(map(self.local, i.types)),
            args=args,
            kwargs=kwargs,
            attrs=tuple(attrs),
        )

    def local(self, t: TensorType) -> TensorType:
        """A type in the form that it has in the set's own program."""
        scope = self.scope(t)
        return replace(t, ratio=None if scope is None else scope.own)
