"""The graph for a part of the batch: the work of one set of devices if samples are divided between sets.

It follows from the data-parallel program, which says which dims of each value hold samples: shapes become
those of the part, arguments that bake in sizes are rewritten by the operators' own rules, and a mean over
samples is scaled by the part's share of them. A sum over all samples within the program (the number of
labels, the statistics of batch norm) becomes a separate value, in ``Part.summed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...lang.ir import (
    LOCAL_NORM,
    Graph,
    Instruction,
    Node,
    Partial,
    Program,
    Ref,
    Replicate,
    Shard,
    TensorType,
    ValueType,
    has_gradient,
    make_ratio,
    map_arguments,
    map_refs,
    shard_offsets,
    shard_sizes,
)
from ...lang.ir.samples import DRAWS, draws_once
from ...lang.rules import RULES, LocalCall, call_of, mean_share

SQUEEZES = ("aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims")
BY_POSITION = ("aten.arange", "aten.arange.start", "aten.arange.start_step")


class NotDivisible(ValueError):
    """The batch of a program cannot be divided between sets of devices."""


@dataclass(frozen=True)
class Cut:
    """The cut of a dim of a whole value: the part has ``size`` elements beginning at ``start``."""

    dim: int
    start: int
    size: int
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A part of the batch; ``graph`` computes its addend of the loss. ``cuts`` gives the part's piece of each
    input or random value, by name, and of each output, by ``output_key``. ``summed`` are values to be summed
    over all parts; in the graph each is a placeholder, its addend times one. ``drawn`` maps random values to
    the numbers of their operators."""

    graph: Graph
    cuts: dict[str, Cut]
    summed: frozenset[str]
    drawn: dict[str, int]


def output_key(name: str) -> str:
    """The key of an output among the cuts of a part, different from the names of values."""
    return f"output {name}"


def part_of(program: Program, counts: Sequence[int], number: int) -> Part:
    """The part with the ``number``-th of ``counts`` samples, for a data-parallel program over any ranks.

    Raises NotDivisible, with the line, if the program gathers or moves values that hold samples.
    """
    return _Cutting(program, counts, number).part()


class _Cutting:
    def __init__(self, program: Program, counts: Sequence[int], number: int) -> None:
        self.program, self.number = program, number
        self.ratio, self.counts = make_ratio(counts), tuple(counts)
        self.nodes: list[Node] = []
        self.types: dict[str, ValueType] = {}
        self.cuts: dict[str, Cut] = {}
        self.summed: set[str] = set()
        self.drawn: dict[str, int] = {}
        self.alias: dict[str, str] = {}
        self.wholes = self.needed_whole()

    def part(self) -> Part:
        program, draws = self.program, 0
        for i in program.instructions:
            if any(r in self.wholes for r in i.results):
                self.whole(i)
            if i.is_leaf:
                self.leaf(i)
            elif i.is_redistribution:
                self.redistribution(i)
            elif i.op == "output":
                self.output(i)
            elif i.op == "update":
                self.keep(i, (), i.args, i.kwargs)
            else:
                if i.op == LOCAL_NORM:
                    raise NotDivisible(f"local batch norm takes each rank's own samples  {i.location}")
                if draws_once(i.op):
                    raise NotDivisible(f"{i.op} draws the same numbers on all devices  {i.location}")
                self.operator(i)
                if i.op in DRAWS:
                    self.drawn.update((r, draws) for r in i.results if r is not None)
                    draws += 1
        if not isinstance(program.types[program.loss].placement, Partial):
            raise NotDivisible(f"the loss %{program.loss} is not summed over samples")
        graph = Graph(program.name, tuple(self.nodes), program.loss)
        return Part(graph, self.cuts, frozenset(self.summed), self.drawn)

    def needed_whole(self) -> set[str]:
        """Gathered values that depend only on inputs (a mask), and everything from which they are computed.
        Each part computes them for the whole batch."""
        program, whole = self.program, set()
        left = [i.inputs[0] for i in program.instructions if i.op == "all_gather"]
        while left:
            name = left.pop()
            maker = program.producers[name]
            if name in whole or (maker.is_leaf and isinstance(maker.type.placement, Replicate)):
                continue
            if maker.op == "param" or maker.op in DRAWS or name in program.requires_grad:
                raise NotDivisible(f"%{name} is gathered from all devices  {maker.location}")
            whole.add(name)
            left += maker.inputs
        return whole

    def whole(self, i: Instruction) -> None:
        """Adds an instruction with its single-device shapes, in addition to the part's."""
        if i.is_redistribution:
            self.alias[f"{i.result}.whole"] = self.name(self.in_whole(i.inputs[0]))
            return
        rename = lambda ref: Ref(self.name(self.in_whole(ref.name)))  # noqa: E731
        args, kwargs = map_arguments(i.args, i.kwargs, rename)
        results = tuple(None if r is None else f"{r}.whole" for r in i.results)
        types = tuple(t.value for t in i.types)
        self.nodes.append(Node(results, types, i.op, args, kwargs, i.location))

    def in_whole(self, name: str) -> str:
        return f"{name}.whole" if name in self.wholes else name

    def name(self, name: str) -> str:
        return self.alias.get(name, name)

    def cut(self, name: str) -> Cut | None:
        return self.cut_of(self.program.types[name], name)

    def cut_of(self, t: TensorType, name: str) -> Cut | None:
        if not isinstance(t.placement, Shard):
            return None
        dim = t.placement.dim
        size = t.value.shape[dim]
        if size % sum(self.counts):
            raise NotDivisible(f"{size} elements of dim {dim} of %{name} are no multiple of the batch")
        sizes = shard_sizes(size, self.ratio, size // sum(self.counts))
        return Cut(dim, shard_offsets(sizes)[self.number], sizes[self.number], t.value.shape)

    def value(self, name: str) -> ValueType:
        return self.value_of(self.program.types[name], name)

    def value_of(self, t: TensorType, name: str) -> ValueType:
        shape, cut = t.value.shape, self.cut_of(t, name)
        whole = shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])
        return ValueType(t.value.dtype, whole)

    def add(self, i: Instruction, op: str, args, result: str = "") -> None:
        args = map_refs(args, self.renamed)
        self.nodes.append(Node((result or i.result,), (self.value(i.result),), op, args, (), i.location))

    def keep(self, i: Instruction, types: tuple[ValueType, ...], args, kwargs, results=None) -> None:
        args, kwargs = map_arguments(args, kwargs, self.renamed)
        self.nodes.append(Node(results or i.results, types, i.op, args, kwargs, i.location))

    def renamed(self, ref: Ref) -> Ref:
        return Ref(self.name(ref.name))

    def leaf(self, i: Instruction) -> None:
        cut = self.cut(i.result)
        if cut is not None:
            if i.op != "input":
                raise NotDivisible(f"the {i.op} %{i.result} is cut between samples")
            if i.result in self.wholes:
                args = (Ref(f"{i.result}.whole"), cut.dim, cut.start, cut.start + cut.size, 1)
                self.add(i, "aten.slice.Tensor", args)
                return
            self.cuts[i.result] = cut
        self.keep(i, (self.value(i.result),), i.args, i.kwargs)

    def redistribution(self, i: Instruction) -> None:
        (source,) = i.inputs
        before, after = self.program.types[source].placement, i.type.placement
        if isinstance(before, Replicate) and isinstance(after, Shard):
            cut = self.cut(i.result)
            assert cut is not None  # a slice is cut
            args = (Ref(source), cut.dim, cut.start, cut.start + cut.size, 1)
            self.add(i, "aten.slice.Tensor", args)
        elif isinstance(before, Partial) and isinstance(after, Replicate):
            self.summed.add(i.result)
            self.add(i, "aten.mul.Tensor", (Ref(source), 1))
        elif i.op == "all_gather":
            self.alias[i.result] = self.name(self.in_whole(source))
        else:
            raise NotDivisible(f"%{i.result} = {i.op}(%{source}) joins samples of all devices  {i.location}")

    def output(self, i: Instruction) -> None:
        """An output whose rows are cut is one of the part's rows; any other is the same in all parts."""
        cut = self.cut(i.inputs[0])
        if cut is not None:
            self.cuts[output_key(i.args[0])] = cut
        options = (("rows", cut is not None), ("grad", has_gradient(i)))
        kwargs = tuple((name, True) for name, holds in options if holds)
        self.keep(i, (), i.args, kwargs)

    def operator(self, i: Instruction) -> None:
        names = [r for r in i.results if r is not None]
        outs = tuple(self.value_of(t, r or i.op) for r, t in zip(i.results, i.types))
        placements = tuple(t.placement for t in i.types)
        if all(isinstance(self.program.types[n].placement, Replicate) for n in (*i.inputs, *names)):
            self.keep(i, outs, i.args, i.kwargs)
            return
        if i.op in BY_POSITION:
            raise NotDivisible(f"%{names[0]} counts positions of samples  {i.location}")
        rule = RULES[i.op]
        call = call_of(i, self.program.types)
        local = LocalCall(
            call,
            tuple(self.program.types[n].placement for n in i.inputs),
            placements,
            tuple(self.value(n).shape for n in i.inputs),
            tuple(t.shape for t in outs),
        )
        for name in names:
            cut = self.cut(name)
            if cut is not None and i.op in DRAWS:
                self.cuts[name] = cut
        if i.op in SQUEEZES:  # in a part with one sample that dim must stay
            self.add(i, "aten.view", (Ref(i.inputs[0]), outs[0].shape))
            return
        args, kwargs = (i.args, i.kwargs) if rule.local is None else rule.local(local)
        share = mean_share(local)
        if share is None:
            self.keep(i, outs, args, kwargs)
            return
        of_part = f"{i.result}.of_part"
        self.keep(i, outs, args, kwargs, (of_part,))
        self.add(i, "aten.mul.Tensor", (Ref(of_part), share))
