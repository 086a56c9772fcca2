"""The distributed program: the instructions of all ranks, as one frozen value that prints as text.

It is the forward program; the backward pass follows from the placements (see ``placement.dual``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...base.lazy import lazy
from .body import Body, Buckets, Values
from .graph import Graph
from .instruction import Instruction
from .levels import Levels
from .placement import Ratio, Replicate, Shard
from .printing import print_instruction
from .types import TensorType, local_shape, participants


@dataclass(frozen=True)
class Program:
    """Instructions in order, with the ratios that their types name. ``loss`` is held as P(sum). ``dtypes``
    gives, for a dtype, the one in which each rank computes it (see ``dtypes``). With ``levels``, gradients
    are summed hierarchically. ``direct_bytes`` is the size of the largest value that is summed in one shot,
    every rank sending its addend to every other one."""

    name: str
    world_size: int
    ratios: tuple[tuple[str, Ratio], ...]
    instructions: tuple[Instruction, ...]
    loss: str
    dtypes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    levels: Levels | None = None
    direct_bytes: int = 0
    body: Body = field(default=None, compare=False, repr=False)  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        if self.body is None or not self.body.is_of(self.name, self.instructions, self.loss):
            values = Values(self.instructions, self.loss)
            body = Body(self.name, self.instructions, self.loss, values)
            object.__setattr__(self, "body", body)

    @property
    def key(self) -> tuple:
        """A key of the instructions, the ratios and the ways of summing."""
        return self.body, self.ratios, self.dtypes, self.levels, self.direct_bytes

    def __str__(self) -> str:
        return print_program(self)

    @property
    def main_ratio(self) -> str:
        """The name of the first ratio, by which a program over one ratio cuts all that it computes. Later
        ratios cut what is stored."""
        return self.ratios[0][0]

    @property
    def shares(self) -> Ratio:
        """The shares of the main ratio."""
        return self.ratios[0][1]

    def with_shares(self, shares: Ratio) -> Program:
        """The program under other shares of the main ratio; the ranks that take part must stay the same."""
        return self.changed(ratios=((self.main_ratio, shares), *self.ratios[1:]))

    def ratio(self, name: str | None) -> Ratio | None:
        return None if name is None else self.ratio_of[name]

    def cut_by(self, t: TensorType) -> Ratio:
        """The ratio that a type is cut by. Raises TypeError for a type without one."""
        if t.ratio is None:
            raise TypeError(f"{t} has no ratio")
        return self.ratio_of[t.ratio]

    def sums_directly(self, size_bytes: int) -> bool:
        """Whether a redistribution sums ``size_bytes`` in one shot, every rank sending its addend to every
        other one."""
        return size_bytes <= self.direct_bytes

    @lazy
    def ratio_of(self) -> dict[str, Ratio]:
        return dict(self.ratios)

    @lazy
    def types(self) -> dict[str, TensorType]:
        return self.body.values.types

    @lazy
    def producers(self) -> dict[str, Instruction]:
        return self.body.producers

    @lazy
    def requires_grad(self) -> frozenset[str]:
        return self.body.values.requires_grad

    @lazy
    def params(self) -> tuple[Instruction, ...]:
        return self.body.params

    @lazy
    def batch_inputs(self) -> tuple[Instruction, ...]:
        return self.body.batch_inputs

    @lazy
    def buckets(self) -> Buckets:
        return self.body.buckets

    @lazy
    def owned(self) -> dict[str, TensorType]:
        """The types of the gradients of owned parameters, by the parameter's result (see ``ownership``)."""
        return {
            i.result: TensorType(i.type.value, Shard(0), ratio)
            for i in self.params
            if (ratio := i.attr("owned")) is not None
            and i.result in self.requires_grad
            and isinstance(i.type.placement, Replicate)
            and len(self.participants(i.type)) > 1
        }

    @lazy
    def wgrads(self) -> dict[int, str]:
        return self.body.wgrads

    @lazy
    def copies(self) -> dict[str, tuple[Instruction, ...]]:
        return self.body.copies

    @lazy
    def late(self) -> frozenset[str]:
        """Names of parameters with copies whose gradients come, at least in part, from redistributions; they
        are complete only at the end of the backward pass."""
        users = [i for i in self.instructions if i.is_redistribution] if self.copies else []
        brought = {name for i in users for name in i.inputs}
        return frozenset(
            name
            for name, copies in self.copies.items()
            if any(i.result in brought and isinstance(i.type.placement, Shard) for i in copies)
        )

    @lazy
    def factored(self) -> frozenset[str]:
        return self.body.factored

    def changed(self, **fields) -> Program:
        """A copy with other ratios, or with the same instructions in another order or with other attributes.
        Facts that follow only from names and types are not computed again, as planning makes many such
        copies."""
        instructions = fields.get("instructions")
        return replace(self, body=self.body.changed(instructions) if instructions else self.body, **fields)

    def local_shape(self, name: str, rank: int) -> tuple[int, ...] | None:
        """The shape of the piece of value ``name`` on ``rank``; None if it takes no part."""
        t = self.types[name]
        return local_shape(t.value, t.placement, self.ratio(t.ratio), rank)

    def participants(self, t: TensorType) -> tuple[int, ...]:
        return self._taking_part[t.ratio]

    @lazy
    def _taking_part(self) -> dict[str | None, tuple[int, ...]]:
        """For each ratio, the ranks that take part; None as a ratio stands for all ranks."""
        unnamed: dict[str | None, tuple[int, ...]] = {None: participants(None, self.world_size)}
        return unnamed | {name: participants(ratio, self.world_size) for name, ratio in self.ratios}

    @lazy
    def working_ranks(self) -> tuple[int, ...]:
        """The ranks that compute anything. The others hold nothing, and only receive the loss."""
        shares = [ratio for _, ratio in self.ratios]
        if not shares or all(map(any, zip(*shares))):
            return self._taking_part[None]
        held = ("param", "buffer")  # some ranks hold parameters or buffers without computing
        names = {t.ratio for i in self.instructions if i.op not in held for t in i.types}
        return tuple(sorted({r for name in names for r in self._taking_part[name]}))

    @property
    def graph(self) -> Graph:
        return self.body.graph


def without_needless_names(program: Program) -> Program:
    """``program`` in its printed form: a value that is not cut names its ratio only if that leaves out some
    rank."""
    everyone = {name for name, ratio in program.ratios if all(share > 0 for share in ratio)}

    def bare(t: TensorType) -> TensorType:
        needless = t.ratio in everyone and not isinstance(t.placement, Shard)
        return replace(t, ratio=None) if needless else t

    bare_types: dict[TensorType, TensorType] = {}
    out = []
    for i in program.instructions:
        for t in i.types:
            if t not in bare_types:
                bare_types[t] = bare(t)
        types = tuple([bare_types[t] for t in i.types])
        out.append(i if types == i.types else replace(i, types=types))
    return replace(program, instructions=tuple(out))


def print_program(program: Program, notes: Mapping[int, str] | None = None) -> str:
    """The text of a program. ``notes`` maps instruction indices to comments (costs, local sizes)."""
    lines = [f"program {program.name} world={program.world_size} {{"]
    for name, ratio in program.ratios:
        lines.append(f"  ratio {name} = [{', '.join(f'{share:g}' for share in ratio)}]")
    lines += [f"  dtype {name} = [{', '.join(row)}]" for name, row in program.dtypes]
    if program.levels is not None:
        sizes = ", ".join(map(str, program.levels.sizes))
        lines.append(f"  levels = [{sizes}] from {program.levels.least_bytes}")
    if program.direct_bytes:
        lines.append(f"  direct to {program.direct_bytes}")
    body = [(f"  {print_instruction(i)}", _note(i, n, notes)) for n, i in enumerate(program.instructions)]
    column = min(100, max((len(text) for text, note in body if note), default=0))
    for text, note in body:
        lines.append(f"{text:<{column}}  # {note}" if note else text)
    return "\n".join([*lines, f"  return %{program.loss}", "}"]) + "\n"


def _note(i: Instruction, index: int, notes: Mapping[int, str] | None) -> str:
    parts = [notes.get(index, "") if notes else "", i.location]
    return "  ".join(p for p in parts if p)
