"""A program of several sets of ranks as the programs that were joined: the way back from ``join``."""

from __future__ import annotations

import re
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
from .join import GATHERED, PADDED, SHARED, Set
from .part import Cut, Part, output_key

OF_SET = re.compile(r"m(\d+)(?:\.(.+))?")  # a set's ratio; without a suffix, for values it holds whole
WHOLE, SAMPLES = ".whole", ".samples"  # suffixes of an input on its way to a set


def is_joined(program: Program) -> bool:
    """Whether ``join`` made a program, judging by the names of its ratios."""
    return "m0" in program.ratio_of and "m1" in program.ratio_of


def split(program: Program) -> tuple[tuple[Set, ...], dict[str, ValueType]]:
    """The sets of a joined program, and the whole inputs by name, from which ``join`` makes a program that
    computes the same on the same ranks.

    Attributes that say how something is done are kept on a set's own instructions, and lost on those that
    join sets (buckets of common parameters, algorithms of their collectives).
    """
    return _Splitting(program).sets(), {
        i.result: i.type.value for i in program.instructions if i.op == "input"
    }


class _Splitting:
    def __init__(self, program: Program) -> None:
        self.whole = program
        numbers = {int(match[1]) for name, _ in program.ratios if (match := OF_SET.fullmatch(name))}
        self.sources: dict[str, dict[int, str]] = {}  # by sum over all sets, each set's addend
        for i in program.instructions:
            is_shared = i.op == "move" and i.type.ratio in (None, SHARED)
            if is_shared and isinstance(i.type.placement, Partial):
                name, _, number = i.result.rpartition(".m")
                self.sources.setdefault(name, {})[int(number)] = own(i.inputs[0])
        self.out: dict[int, list[Instruction]] = {m: [] for m in sorted(numbers)}
        self.cuts: dict[int, dict[str, Cut]] = {m: {} for m in self.out}
        self.drawn: dict[int, dict[str, int]] = {m: {} for m in self.out}
        self.summed: dict[int, set[str]] = {m: set() for m in self.out}

    def sets(self) -> tuple[Set, ...]:
        for i in self.whole.instructions:
            if i.op == "output":
                self.output(i)
            elif i.op == "update":
                self.out[number_of(i.inputs[0])].append(replace(i, args=(i.args[0], Ref(own(i.inputs[0])))))
            elif i.types and (match := OF_SET.fullmatch(i.types[0].ratio or "")):
                self.instruction(int(match[1]), i)
        return tuple(self.set(m) for m in self.out)

    def output(self, i: Instruction) -> None:
        """Gives an output back to the sets that hold rows of it, or to the one that holds all."""
        maker = self.whole.producers[i.inputs[0]]
        addends = self.sources.get(f"{i.args[0]}.addends")
        if addends is None:
            source = maker.inputs[0]
            self.out[number_of(source)].append(replace(i, args=(i.args[0], Ref(own(source)))))
            return
        for m, padded in addends.items():
            source = padded.removesuffix(PADDED)
            pad = self.whole.producers[f"{padded}.m{m}"]
            value, start = self.whole.types[f"{source}.m{m}"].value, pad.args[1][-2]
            whole = pad.type.value.shape
            self.cuts[m][output_key(i.args[0])] = Cut(0, start, value.shape[0], whole)
            self.out[m].append(replace(i, args=(i.args[0], Ref(source))))

    def set(self, m: int) -> Set:
        ratios: list[tuple[str, Ratio]] = []
        for name, ratio in self.whole.ratios:
            match = OF_SET.fullmatch(name)
            if match and int(match[1]) == m and match[2]:
                ratios.append((match[2], ratio))
        loss = self.sources["loss.total"][m]
        program = Program(
            self.whole.name, self.whole.world_size, tuple(ratios), tuple(self.out[m]), loss, self.whole.dtypes
        )
        return Set(Part(program.graph, self.cuts[m], frozenset(self.summed[m]), self.drawn[m]), program)

    def instruction(self, m: int, i: Instruction) -> None:
        if i.results[0] is not None and own(i.results[0]).endswith((GATHERED, PADDED)):
            return  # on the way of an output to everyone
        name = own(next(r for r in i.results if r is not None).removesuffix(WHOLE).removesuffix(SAMPLES))
        leaf = self.whole.producers.get(name)
        if leaf is not None and leaf.is_leaf:
            self.leaf(m, i, name, leaf)
        elif f"{name}.total" in self.whole.producers and f"{name}.addends" in self.sources:
            if i.result == f"{name}.m{m}":
                self.summed[m].add(name)
                args = (Ref(self.sources[f"{name}.addends"][m]), 1)
                self.out[m].append(Instruction((name,), (local(i.type),), "aten.mul.Tensor", args))
        else:
            self.out[m].append(self.of_set(m, i))

    def leaf(self, m: int, i: Instruction, name: str, leaf: Instruction) -> None:
        """Turns the last instruction that brings an input or parameter to a set into a leaf."""
        if i.op == "aten.slice.Tensor":
            dim, start, stop = i.args[1:4]
            self.cuts[m][name] = Cut(dim, start, stop - start, leaf.type.value.shape)
        if i.result == f"{name}.m{m}":
            self.out[m].append(replace(leaf, types=(local(i.type),), attrs=()))

    def of_set(self, m: int, i: Instruction) -> Instruction:
        args, kwargs = map_arguments(i.args, i.kwargs, lambda ref: Ref(own(ref.name)))
        results = tuple(None if r is None else own(r) for r in i.results)
        drawn = i.attr("drawn") if i.attrs else None
        if drawn is not None:
            number, dim, start, *whole = drawn
            for r, t in zip(results, i.types):
                if r is not None:
                    self.drawn[m][r] = number
                    size = t.value.shape[dim] if t.value.shape else 0
                    self.cuts[m][r] = Cut(dim, start, size, tuple(whole))
        attrs = ((k, v // len(self.out) if k == "recompute" else v) for k, v in i.attrs if k != "drawn")
        return replace(
            i,
            results=results,
            types=tuple(map(local, i.types)),
            args=args,
            kwargs=kwargs,
            attrs=tuple(attrs),
        )


def own(name: str) -> str:
    """The name of a value within a set."""
    return re.sub(r"\.m\d+$", "", name)


def number_of(name: str) -> int:
    """The number of the set that a value is of."""
    return int(name.rpartition(".m")[2])


def local(t: TensorType) -> TensorType:
    """A type as the program of a set has it."""
    match = OF_SET.fullmatch(t.ratio or "")
    return replace(t, ratio=match and match[2])
