"""Joins programs for parts of the batch, on disjoint sets of ranks, into one program.

Each set runs its own program. The sets are joined by the loss, by sums over all samples within the program,
and by the gradients. A parameter that all sets hold whole is loaded once; of any other each set has a copy,
held as its program says, and the gradients of copies are summed cell by cell (``ir.copies``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...lang.ir import (
    PARTIAL,
    REPLICATE,
    Instruction,
    Program,
    Ratio,
    Ref,
    Replicate,
    TensorType,
    ValueType,
    has_rows,
    map_arguments,
    outputs_of,
    redistribution,
    support,
)
from .lower import even_over
from .part import NotDivisible, Part, output_key
from .sets import SHARED, Member

WHOLE, SAMPLES = ".whole", ".samples"  # suffixes of an input's value on its way to a set
GATHERED, PADDED = ".gathered", ".padded"  # suffixes of an output's value on its way to all ranks


@dataclass(frozen=True)
class Set:
    """A set of ranks, its part of the batch, and the program that computes it: over all ranks, with zero
    shares for those outside the set."""

    part: Part
    program: Program

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({r for _, ratio in self.program.ratios for r in support(ratio)}))


def join(name: str, sets: Sequence[Set], values: dict[str, ValueType]) -> Program:
    """One program made of two or more sets. ``values`` are the whole inputs by name.

    Raises NotDivisible if sums over all samples are not in the same order in all sets.
    """
    return _Joining(name, sets, values).program()


class _Joining:
    def __init__(self, name: str, sets: Sequence[Set], values: dict[str, ValueType]) -> None:
        self.name, self.sets, self.values = name, sets, values
        self.members = tuple(map(Member, range(len(sets))))
        self.world_size = sets[0].program.world_size
        self.ratios: list[tuple[str, Ratio]] = []
        members = tuple(sorted(r for s in sets for r in s.ranks))
        self.shared = None if len(members) == self.world_size else SHARED
        if self.shared is not None:
            self.ratios.append((SHARED, even_over(members, self.world_size)))
        self.everyone: set[str] = set()  # leaves that all sets hold
        self.out: list[Instruction] = []
        self.loaded = [{i.args[0]: i for i in s.program.params} for s in sets]

    def program(self) -> Program:
        for member, s in zip(self.members, self.sets):
            self.ratios += [(member.ratio(name), ratio) for name, ratio in s.program.ratios]
            self.ratios.append((member.ratio(None), even_over(s.ranks, self.world_size)))
        streams = [self.stream(member) for member in self.members]
        while True:
            # each set, up to its next sum over all samples or its end
            met = self.interleave(streams)
            if len(set(met)) > 1:
                raise NotDivisible(f"sets of devices sum %{met[0]} and %{met[1]} in different orders")
            if met[0] is None:
                break
            self.meet(met[0])
        for i in outputs_of(self.sets[0].program).values():
            self.output(i)
        loss = self.total([s.program.loss for s in self.sets], "loss.total")
        return Program(self.name, self.world_size, tuple(self.ratios), tuple(self.out), loss)

    def interleave(self, streams: list[Iterator[str]]) -> list[str | None]:
        """Interleaves the instructions of all sets, so that at each line all sets have progressed equally far
        and hold the memory that belongs to that point."""
        met: list[str | None] = [""] * len(streams)
        while "" in met:
            for m, stream in enumerate(streams):
                if met[m] == "":
                    met[m] = next(stream, None)
        return met

    def stream(self, member: Member) -> Iterator[str]:
        """Adds the instructions of a set. Yields "" after each, or the name of a sum over all samples that
        has to be made there."""
        s = self.sets[member.number]
        moved = [moved_to_all(s.program, i) for i in outputs_of(s.program).values()]
        for i in s.program.instructions:
            if i in moved:
                continue  # goes to ranks outside of the set
            if i.is_leaf:
                self.leaf(member, i)
            elif i.op == "update":
                args = (i.args[0], Ref(member.value(i.inputs[0])))
                self.out.append(replace(i, args=args))
            elif i.op == "output":
                continue  # made for all sets together at the end
            elif i.results[0] in s.part.summed:
                yield i.results[0]
            else:
                self.out.append(self.of_set(member, i))
            yield ""

    def of_set(self, member: Member, i: Instruction) -> Instruction:
        args, kwargs = map_arguments(i.args, i.kwargs, lambda ref: Ref(member.value(ref.name)))
        part, attrs = self.sets[member.number].part, i.attrs
        drawn = next((r for r in i.results if r in part.drawn), None)
        if drawn is not None:
            cut = part.cuts.get(drawn)
            if cut is not None:
                attrs += (("drawn", (part.drawn[drawn], cut.dim, cut.start, *cut.whole)),)
            else:
                shape = i.types[0].value.shape
                attrs += (("drawn", (part.drawn[drawn], 0, 0, *shape)),)
        num_sets = len(self.sets)
        attrs = tuple((k, member.region(v, num_sets) if k == "recompute" else v) for k, v in attrs)
        return replace(
            i,
            results=tuple(None if r is None else member.value(r) for r in i.results),
            types=tuple(self.type(member, t) for t in i.types),
            args=args,
            kwargs=kwargs,
            attrs=attrs,
        )

    def type(self, member: Member, t: TensorType) -> TensorType:
        return replace(t, ratio=member.ratio(t.ratio))

    def leaf(self, member: Member, i: Instruction) -> None:
        mine = self.type(member, i.type)
        if i.op == "param" and any(
            not isinstance(loaded[i.args[0]].type.placement, Replicate) for loaded in self.loaded
        ):
            attrs = tuple((k, v) for k, v in i.attrs if k != "bucket")
            self.out.append(replace(i, results=(member.value(i.result),), types=(mine,), attrs=attrs))
            return
        value = self.values.get(i.result, i.type.value)
        if i.result not in self.everyone:
            self.everyone.add(i.result)
            whole = TensorType(value, REPLICATE, self.shared)
            self.out.append(replace(i, types=(whole,), attrs=()))
        cut = self.sets[member.number].part.cuts.get(i.result) if i.op == "input" else None
        sharded = not isinstance(i.type.placement, Replicate)
        last = member.value(i.result)
        first = last if cut is None and not sharded else f"{last}{WHOLE}"
        held = TensorType(value, REPLICATE, member.ratio(None))
        self.add(first, "move", (Ref(i.result),), held)
        if cut is not None:
            name = f"{last}{SAMPLES}" if sharded else last
            held = TensorType(i.type.value, REPLICATE, member.ratio(None))
            args = (Ref(first), cut.dim, cut.start, cut.start + cut.size, 1)
            self.add(name, "aten.slice.Tensor", args, held)
            first = name
        if sharded:
            self.add(last, "local_slice", (Ref(first),), mine)

    def add(self, name: str, op: str, args, t: TensorType) -> str:
        self.out.append(Instruction((name,), (t,), op, args))
        return name

    def meet(self, name: str) -> None:
        """Adds the sum over all samples, then converts it in each set to the placement that the set has for
        it."""
        sources = [s.program.producers[name].inputs[0] for s in self.sets]
        total = self.total(sources, f"{name}.addends")
        value = self.sets[0].program.types[name].value
        self.add(f"{name}.total", "all_reduce", (Ref(total),), TensorType(value, REPLICATE, self.shared))
        for member, s in zip(self.members, self.sets):
            t = self.type(member, s.program.types[name])
            held, last = TensorType(value, REPLICATE, member.ratio(None)), member.value(name)
            if isinstance(t.placement, Replicate):
                self.add(last, "move", (Ref(f"{name}.total"),), replace(held, ratio=t.ratio))
                continue
            first = self.add(f"{last}{WHOLE}", "move", (Ref(f"{name}.total"),), held)
            op = redistribution(REPLICATE, t.placement)
            self.add(last, op, (Ref(first),), t)

    def total(self, sources: list[str], name: str) -> str:
        """A sum over all sets, held by all of them, from an addend of each; a rank has zero for the addends
        of other sets."""
        value = self.sets[0].program.types[sources[0]].value
        addends = [member.value(v) for member, v in zip(self.members, sources)]
        return self.sum(addends, name, value, self.shared)

    def sum(self, pieces: list[str], name: str, value: ValueType, ratio: str | None = None) -> str:
        """Adds the sum of ``pieces``, one addend from each set; it is held by the ranks of ``ratio``, or by
        all."""
        everyone = TensorType(value, PARTIAL, ratio)
        totals = [
            self.add(member.value(name), "move", (Ref(v),), everyone)
            for member, v in zip(self.members, pieces)
        ]
        result = totals[0]
        for n, other in enumerate(totals[1:], 1):
            total = name if n == len(totals) - 1 else f"{name}.{n}"
            result = self.add(total, "aten.add.Tensor", (Ref(result), Ref(other)), everyone)
        return result

    def output(self, first: Instruction) -> None:
        """Adds an output, whole on all ranks: the sum of the rows of each set, padded with zeros in place of
        the others' rows."""
        name, source = first.args[0], first.inputs[0]
        moved = moved_to_all(self.sets[0].program, first)
        source = source if moved is None else moved.inputs[0]
        value, cut = self.sets[0].program.types[source].value, self.sets[0].part.cuts.get(output_key(name))
        if cut is None:
            whole = TensorType(value, REPLICATE)
            shown = self.add(f"{name}.shown", "move", (Ref(self.members[0].value(source)),), whole)
        elif value.dtype == "bool":
            raise NotDivisible(f"the output {name} is bool, of which sets of devices make no sum")
        else:
            value = replace(value, shape=cut.whole)
            pieces = [
                self.padded(member, outputs_of(s.program)[name]) for member, s in zip(self.members, self.sets)
            ]
            total = self.sum(pieces, f"{name}.addends", value)
            whole = TensorType(value, REPLICATE)
            shown = self.add(f"{name}.shown", "all_reduce", (Ref(total),), whole)
        self.out.append(replace(first, args=(name, Ref(shown))))

    def padded(self, member: Member, i: Instruction) -> str:
        """The rows of a set, padded with zeros for the rows of others, whole on its ranks."""
        s, (source,) = self.sets[member.number], i.inputs
        t, cut = s.program.types[source], s.part.cuts[output_key(i.args[0])]
        name, held = member.value(source), self.type(member, t)
        if not isinstance(t.placement, Replicate):
            held = replace(held, placement=REPLICATE)
            name = self.add(member.value(f"{source}{GATHERED}"), "all_gather", (Ref(name),), held)
        rows = cut.start, cut.whole[0] - cut.start - cut.size
        args = Ref(name), (0, 0) * (len(cut.whole) - 1) + rows
        whole = replace(held, value=replace(t.value, shape=cut.whole))
        return self.add(member.value(f"{source}{PADDED}"), "aten.constant_pad_nd", args, whole)


def moved_to_all(program: Program, i: Instruction) -> Instruction | None:
    """The instruction that moves an output to ranks without samples, if there is one."""
    maker = program.producers[i.inputs[0]]
    return maker if maker.op == "move" and not has_rows(i) else None
