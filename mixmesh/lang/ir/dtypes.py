"""A dtype per rank: ``dtype bf16 = [bf16, f16]`` in a program names the dtype in which each computes bf16.

A device without bf16 computes such values in f16, which has as many bytes. Only values that a rank computes
for itself may differ in that way: leaves keep the dtype that the user gave them, and all ranks of a
collective hold one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .graph import Arg, DType, Graph, Node
from .instruction import Instruction
from .program import Program
from .types import ValueType

STAND_INS = {"bf16": ("bf16", "f16")}  # dtypes of the same size, so that costs and memory do not change
# operators whose whole-number arguments are computed with
COMPUTES = ("const", "fill", "full", "Scalar", "clamp")
LARGEST = {"bf16": 3.3895313892515355e38, "f16": 65504.0}


def on_rank(program: Program, rank: int) -> Program:
    """The program for ``rank``, with its own dtypes."""
    instead = {name: row[rank] for name, row in program.dtypes if row[rank] != name}
    if not instead:
        return program

    def value(t: ValueType) -> ValueType:
        return replace(t, dtype=instead[t.dtype]) if t.dtype in instead else t

    def arg(a: Arg) -> Arg:
        if isinstance(a, DType):
            return DType(instead.get(a.name, a.name))
        return tuple(map(arg, a)) if isinstance(a, tuple) else a

    def here(i: Instruction) -> Instruction:
        if i.is_leaf:
            return i
        types = tuple(replace(t, value=value(t.value)) for t in i.types)
        kwargs = tuple((k, arg(v)) for k, v in i.kwargs)
        return replace(i, types=types, args=tuple(map(arg, i.args)), kwargs=kwargs)

    return replace(program, instructions=tuple(map(here, program.instructions)), dtypes=())


def dtype_conflicts(program: Program) -> Iterator[tuple[Instruction, str]]:
    """Yields the instructions that cannot run in the program's dtypes, each with the reason."""
    rows = {name: row for name, row in program.dtypes if set(row) != {name}}
    for i in program.instructions if rows else ():
        held = [*i.types, *(program.types[name] for name in i.inputs)]
        for t in held:
            row = rows.get(t.value.dtype)
            if row is None:
                continue
            ranks = sorted({r for u in held for r in program.participants(u)})
            if i.is_leaf:
                yield i, f"a leaf is held in its own dtype, {t.value.dtype}"
            elif (i.is_redistribution and i.op != "local_slice") or i.attr("sfb", False):
                if len({row[r] for r in ranks}) > 1:
                    yield i, f"ranks that meet hold {t.value.dtype} in different dtypes"
            elif (too_large := overflow(i, {row[r] for r in ranks})) is not None:
                yield i, f"{too_large:g} is more than f16 can hold"
            elif program.loss in i.results:
                yield i, f"the loss is summed in {t.value.dtype}, which ranks hold in different dtypes"
            else:
                continue
            break


def overflow(i: Instruction, dtypes: set[str]) -> float | None:
    """The first number among the arguments that one of these dtypes cannot hold, or None."""
    largest = min(LARGEST[dtype] for dtype in dtypes)
    return next((a for a in _numbers(i) if largest < abs(a) < float("inf")), None)


def _numbers(node: Node | Instruction) -> Iterator[float]:
    """Yields the arguments that are numbers to compute with. Whole numbers are sizes and positions, except in
    a few operators."""
    whole = any(word in node.op for word in COMPUTES)
    for a in (*node.args, *(v for _, v in node.kwargs)):
        for number in a if node.op == "const" and isinstance(a, tuple) else (a,):
            if isinstance(number, float) or (whole and type(number) is int):
                yield float(number)


def half_dtypes(graph: Graph, computes_bf16: tuple[bool, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The ``dtype`` rows of a program for ranks of which some cannot compute bf16.

    Empty if the graph has no bf16, if all ranks compute it, or if f16 cannot replace it because parameters
    themselves are bf16, or the graph has a number that bf16 can hold and f16 cannot. In the last case devices
    without bf16 emulate it.
    """
    computed = [n for n in graph.nodes if any(t.dtype == "bf16" for t in n.types)]
    if all(computes_bf16) or not computed:
        return ()
    if any(n.is_leaf or n.is_sink for n in computed) or graph.types[graph.loss].dtype == "bf16":
        return ()
    # any node counts, as values computed in f32 may be cast to bf16 later
    floating = (n for n in graph.nodes if any(t.is_floating for t in n.types))
    if any(LARGEST["f16"] < abs(a) <= LARGEST["bf16"] for n in floating for a in _numbers(n)):
        return ()
    return (("bf16", tuple("bf16" if able else "f16" for able in computes_bf16)),)
