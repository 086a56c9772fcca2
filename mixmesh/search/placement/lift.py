"""Lifts a program of several ratios back to the data-parallel form from which ``lower`` makes such programs.
Every operator is placed as in the program; the redistributions between operators are new."""

from __future__ import annotations

from collections.abc import Mapping

from ...lang.ir import (
    REPLICATE,
    Instruction,
    Program,
    Ratio,
    Ref,
    Shard,
    TensorType,
    redistribution,
    with_inputs,
)
from .lower import Placed, even_over


def ratios_of(program: Program) -> dict[str, Ratio]:
    """The ratio under which each operator runs, by its first result; none for operators that name no ratio,
    which all ranks run alike."""
    out: dict[str, Ratio] = {}
    for i in program.instructions:
        if i.is_leaf or i.is_redistribution or i.is_sink:
            continue
        types = [*i.types, *(program.types[name] for name in i.inputs)]
        cut = [t.ratio for t in types if t.ratio is not None and isinstance(t.placement, Shard)]
        named = [*cut, *(t.ratio for t in types if t.ratio is not None)]
        if named:
            out[operator_name(i)] = program.ratio_of[named[0]]
    return out


def placed_of(program: Program) -> dict[str, Placed]:
    """``ratios_of`` in the form that ``lower`` takes. Shard owners are left out: parameters hold them."""
    return {name: Placed(ratio) for name, ratio in ratios_of(program).items()}


def operator_name(i) -> str:
    return next((r for r in i.results if r is not None), "")


def lifted(program: Program, others: Mapping[str, Program] | None = None) -> Program:
    """The model of ``program`` over one ratio. Every operator takes and gives its values as in ``program``,
    or as in the program that ``others`` has for the operator's name, which is one of the same model over any
    ranks."""
    return _Lifting(program, others or {}).program()


class _Lifting:
    def __init__(self, program: Program, others: Mapping[str, Program]) -> None:
        self.source, self.graph = program, program.graph
        self.others = others
        self.out: list[Instruction] = []
        self.types: dict[str, TensorType] = {}

    def program(self) -> Program:
        for node in self.graph.nodes:
            if node.is_leaf:
                types = (TensorType(node.types[0], REPLICATE, "r0"),)
                self.add(Instruction(node.results, types, node.op, node.args, node.kwargs, (), node.location))
            else:
                self.operator(node)
        ratio = even_over(range(self.source.world_size), self.source.world_size)
        return Program(
            self.source.name, self.source.world_size, (("r0", ratio),), tuple(self.out), self.graph.loss
        )

    def operator(self, node) -> None:
        if node.is_sink:
            self.out.append(Instruction(node.results, (), node.op, node.args, node.kwargs, (), node.location))
            return
        program = self.others.get(operator_name(node), self.source)
        maker = program.producers[operator_name(node)]
        names = [self.need(name, program.types[held]) for name, held in zip(node.inputs, maker.inputs)]
        args, kwargs = with_inputs(node.args, node.kwargs, names)
        types = tuple(TensorType(t.value, t.placement, "r0") for t in maker.types)
        self.add(Instruction(node.results, types, node.op, args, kwargs, maker.attrs, node.location))

    def need(self, name: str, wanted: TensorType) -> str:
        """The name of the value in the wanted placement; the redistribution is added once."""
        held = self.types[name].placement
        if held == wanted.placement:
            return name
        held_name = f"{name} as {wanted.placement}"
        if held_name not in self.types:
            t = TensorType(self.types[name].value, wanted.placement, "r0")
            self.add(Instruction((held_name,), (t,), redistribution(held, wanted.placement), (Ref(name),)))
        return held_name

    def add(self, i: Instruction) -> None:
        self.out.append(i)
        self.types.update((r, t) for r, t in zip(i.results, i.types) if r is not None)
