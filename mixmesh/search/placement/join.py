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

SHARED = "m"  # the ratio of values that all sets hold, if some ranks are in no set
GATHERED, PADDED = ".gathered", ".padded"  # behind the name of an output's value, on its way to everyone


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
        for m, s in enumerate(self.sets):
            self.ratios += [(f"m{m}.{name}", ratio) for name, ratio in s.program.ratios]
            self.ratios.append((f"m{m}", even_over(s.ranks, self.world_size)))
        streams = [self.stream(m) for m in range(len(self.sets))]
        while True:
            # each up to its next sum over all samples, or its end
            met = self.interleave(streams)
            if len(set(met)) > 1:
                raise NotDivisible(f"sets of devices sum %{met[0]} and %{met[1]} in different orders")
            if met[0] is None:
                break
            self.meet(met[0])
        for i in outputs_of(self.sets[0].program).values():
            self.output(i)
        loss = self.total([(m, s.program.loss) for m, s in enumerate(self.sets)], "loss.total")
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

    def stream(self, m: int) -> Iterator[str]:
        """Adds the instructions of a set; gives "" after each, or the name of a sum over all samples where
        one has to be made."""
        s = self.sets[m]
        moved = [moved_to_all(s.program, i) for i in outputs_of(s.program).values()]
        for i in s.program.instructions:
            if i in moved:
                continue  # to ranks outside of the set
            if i.is_leaf:
                self.leaf(m, i)
            elif i.op == "update":
                args = (i.args[0], Ref(f"{i.inputs[0]}.m{m}"))
                self.out.append(replace(i, args=args))
            elif i.op == "output":
                continue  # for all sets together, in the end
            elif i.results[0] in s.part.summed:
                yield i.results[0]
            else:
                self.out.append(self.of_set(m, i))
            yield ""

    def of_set(self, m: int, i: Instruction) -> Instruction:
        args, kwargs = map_arguments(i.args, i.kwargs, lambda ref: Ref(f"{ref.name}.m{m}"))
        part, attrs = self.sets[m].part, i.attrs
        drawn = next((r for r in i.results if r in part.drawn), None)
        if drawn is not None:
            cut = part.cuts.get(drawn)
            if cut is not None:
                attrs += (("drawn", (part.drawn[drawn], cut.dim, cut.start, *cut.whole)),)
            else:
                shape = i.types[0].value.shape
                attrs += (("drawn", (part.drawn[drawn], 0, 0, *shape)),)
        # a region is of one set's computations: no rank computes again for another
        attrs = tuple((k, v * len(self.sets) + m if k == "recompute" else v) for k, v in attrs)
        return replace(
            i,
            results=tuple(None if r is None else f"{r}.m{m}" for r in i.results),
            types=tuple(self.type(m, t) for t in i.types),
            args=args,
            kwargs=kwargs,
            attrs=attrs,
        )

    def type(self, m: int, t: TensorType) -> TensorType:
        return replace(t, ratio=f"m{m}" if t.ratio is None else f"m{m}.{t.ratio}")

    def leaf(self, m: int, i: Instruction) -> None:
        mine = self.type(m, i.type)
        if i.op == "param" and any(
            not isinstance(loaded[i.args[0]].type.placement, Replicate) for loaded in self.loaded
        ):
            attrs = tuple((k, v) for k, v in i.attrs if k != "bucket")
            self.out.append(replace(i, results=(f"{i.result}.m{m}",), types=(mine,), attrs=attrs))
            return
        value = self.values.get(i.result, i.type.value)
        if i.result not in self.everyone:
            self.everyone.add(i.result)
            whole = TensorType(value, (REPLICATE,), self.shared)
            self.out.append(replace(i, types=(whole,), attrs=()))
        cut = self.sets[m].part.cuts.get(i.result) if i.op == "input" else None
        sharded = not isinstance(i.type.placement, Replicate)
        last = f"{i.result}.m{m}"
        first = last if cut is None and not sharded else f"{last}.whole"
        held = TensorType(value, (REPLICATE,), f"m{m}")
        self.add(first, "move", (Ref(i.result),), held)
        if cut is not None:
            name = f"{last}.samples" if sharded else last
            held = TensorType(i.type.value, (REPLICATE,), f"m{m}")
            args = (Ref(first), cut.dim, cut.start, cut.start + cut.size, 1)
            self.add(name, "aten.slice.Tensor", args, held)
            first = name
        if sharded:
            self.add(last, "local_slice", (Ref(first),), mine)

    def add(self, name: str, op: str, args, t: TensorType) -> str:
        self.out.append(Instruction((name,), (t,), op, args))
        return name

    def meet(self, name: str) -> None:
        """Adds the sum over all samples, then converts it in each set to the placement of the set's
        program."""
        sources = []
        for m, s in enumerate(self.sets):
            (source,) = s.program.producers[name].inputs
            sources.append((m, source))
        total = self.total(sources, f"{name}.addends")
        value = self.sets[0].program.types[name].value
        self.add(f"{name}.total", "all_reduce", (Ref(total),), TensorType(value, (REPLICATE,), self.shared))
        for m, s in enumerate(self.sets):
            t = self.type(m, s.program.types[name])
            held = TensorType(value, (REPLICATE,), f"m{m}")
            if isinstance(t.placement, Replicate):
                self.add(f"{name}.m{m}", "move", (Ref(f"{name}.total"),), replace(held, ratio=t.ratio))
                continue
            first = self.add(f"{name}.m{m}.whole", "move", (Ref(f"{name}.total"),), held)
            op = redistribution(REPLICATE, t.placement)
            self.add(f"{name}.m{m}", op, (Ref(first),), t)

    def total(self, sources: list[tuple[int, str]], name: str) -> str:
        """A sum over all sets, held by all of them, from an addend of each; a rank has zero for the addends
        of other sets."""
        value = self.sets[0].program.types[sources[0][1]].value
        return self.sum([f"{v}.m{m}" for m, v in sources], name, value, self.shared)

    def sum(self, pieces: list[str], name: str, value: ValueType, ratio: str | None = None) -> str:
        """Sums ``pieces``, one addend from each set; the sum is held by the ranks of ``ratio``, or by all."""
        everyone = TensorType(value, (PARTIAL,), ratio)
        totals = [self.add(f"{name}.m{m}", "move", (Ref(v),), everyone) for m, v in enumerate(pieces)]
        result = totals[0]
        for n, other in enumerate(totals[1:], 1):
            total = name if n == len(totals) - 1 else f"{name}.{n}"
            result = self.add(total, "aten.add.Tensor", (Ref(result), Ref(other)), everyone)
        return result

    def output(self, first: Instruction) -> None:
        """Adds an output, whole on all ranks: each set adds its own rows, padded by zeros in place of the
        others'."""
        name, source = first.args[0], first.inputs[0]
        moved = moved_to_all(self.sets[0].program, first)
        source = source if moved is None else moved.inputs[0]
        value, cut = self.sets[0].program.types[source].value, self.sets[0].part.cuts.get(output_key(name))
        if cut is None:
            whole = TensorType(value, (REPLICATE,))
            shown = self.add(f"{name}.shown", "move", (Ref(f"{source}.m0"),), whole)
        elif value.dtype == "bool":
            raise NotDivisible(f"the output {name} is bool, of which sets of devices make no sum")
        else:
            value = replace(value, shape=cut.whole)
            pieces = [self.padded(m, outputs_of(s.program)[name]) for m, s in enumerate(self.sets)]
            total = self.sum(pieces, f"{name}.addends", value)
            whole = TensorType(value, (REPLICATE,))
            shown = self.add(f"{name}.shown", "all_reduce", (Ref(total),), whole)
        self.out.append(replace(first, args=(name, Ref(shown))))

    def padded(self, m: int, i: Instruction) -> str:
        """The rows of a set, padded by zeros for those of others, whole on its ranks."""
        program, (source,) = self.sets[m].program, i.inputs
        t, cut = program.types[source], self.sets[m].part.cuts[output_key(i.args[0])]
        name, held = f"{source}.m{m}", self.type(m, t)
        if not isinstance(t.placement, Replicate):
            held = replace(held, placements=(REPLICATE,))
            name = self.add(f"{source}{GATHERED}.m{m}", "all_gather", (Ref(name),), held)
        rows = cut.start, cut.whole[0] - cut.start - cut.size
        args = Ref(name), (0, 0) * (len(cut.whole) - 1) + rows
        whole = replace(held, value=replace(t.value, shape=cut.whole))
        return self.add(f"{source}{PADDED}.m{m}", "aten.constant_pad_nd", args, whole)


def moved_to_all(program: Program, i: Instruction) -> Instruction | None:
    """The instruction that moves an output to ranks without samples, if it is moved."""
    maker = program.producers[i.inputs[0]]
    return maker if maker.op == "move" and not has_rows(i) else None
