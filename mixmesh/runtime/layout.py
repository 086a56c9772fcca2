"""The layout of a tensor (which rank holds which piece), and the steps that turn one layout into another.

A redistribution ``src -> dst`` may change the placement, the ratio and the set of ranks at once. It is a
short list of primitive steps, each of which moves data between at most one set of ranks:

    gather      S -> R    every rank of either side receives all pieces
    scatter     P -> S    the addends are summed, each owner receives its piece (reduce_scatter)
    reduce      P -> R    the addends are summed everywhere (all_reduce)
    exchange    S -> S    each rank sends every other one the elements that it needs (all_to_all)
    spread      R -> R    the first holder broadcasts to the ranks that have no copy
    fold        P -> P    ranks that leave give their addend to the first one that stays (reduce)
    slice       R -> S    local
    as_partial  R -> P    local: one rank keeps its copy, the others hold zeros
    pad         S -> P    local

Communication costs nothing where one rank holds everything already: a gather from one owner *is* a broadcast,
and its gradient a reduce, because pieces of size zero are never sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..cost.communicators import BETWEEN, DOWN, UP
from ..cost.outline import purpose_of
from ..lang.ir import (
    PARTIAL,
    REPLICATE,
    Partial,
    Parts,
    Placement,
    Program,
    Replicate,
    Shard,
    TensorType,
    cells,
    dual,
    leaders,
    shard_offsets,
    shard_sizes,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one tensor. ``sizes`` (per rank of the world, along the dim) is empty unless sharded."""

    placement: Placement
    ranks: tuple[int, ...]
    sizes: tuple[int, ...] = ()

    @property
    def dual(self) -> Layout:
        """The layout of the gradient."""
        return Layout(dual(self.placement), self.ranks, self.sizes)

    @property
    def dim(self) -> int:
        assert isinstance(self.placement, Shard)
        return self.placement.dim

    def piece(self, rank: int) -> tuple[int, int]:
        """Offset and size of this rank's piece along the sharded dim."""
        return shard_offsets(self.sizes)[rank], self.sizes[rank]

    def shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The local shape; a rank outside the layout holds an empty piece if the tensor is sharded."""
        if not isinstance(self.placement, Shard):
            return shape
        return shape[: self.dim] + (self.sizes[rank],) + shape[self.dim + 1 :]


@dataclass(frozen=True, slots=True)
class Step:
    kind: str
    src: Layout
    dst: Layout
    ranks: tuple[int, ...] = ()  # the ranks that communicate; empty for a local step


def layout(program: Program, t: TensorType) -> Layout:
    ratio, placement = program.ratio(t.ratio), t.placement
    ranks = program.participants(t)
    if not isinstance(placement, Shard):
        return Layout(placement, ranks)
    return Layout(placement, ranks, shard_sizes(t.value.shape[placement.dim], ratio, placement.unit))


def union(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*a, *b}))


# steps in which all ranks of both layouts meet
OF_EVERYONE = {
    (Shard, Replicate): "gather",
    (Partial, Shard): "scatter",
    (Partial, Replicate): "reduce",
    (Shard, Shard): "exchange",
}


@lru_cache(maxsize=4096)
def route(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """The steps from ``src`` to ``dst``, in order. Empty if nothing changes."""
    if src == dst:
        return ()
    everyone = union(src.ranks, dst.ranks)
    if name := OF_EVERYONE.get((type(src.placement), type(dst.placement))):
        return (Step(name, src, dst, everyone),)
    match src.placement, dst.placement:
        case Replicate(), Replicate():
            missing = tuple(r for r in dst.ranks if r not in src.ranks)
            return (Step("spread", src, dst, union(src.ranks[:1], missing) if missing else ()),)
        case Partial(), Partial():
            leaving = tuple(r for r in src.ranks if r not in dst.ranks)
            return (Step("fold", src, dst, union(dst.ranks[:1], leaving) if leaving else ()),)
        case Replicate(), Shard():
            held = src if set(dst.ranks) <= set(src.ranks) else Layout(REPLICATE, dst.ranks)
            return route(src, held) + (Step("slice", held, dst),)
        case Replicate(), Partial():
            held = src if set(src.ranks) & set(dst.ranks) else Layout(REPLICATE, dst.ranks)
            return route(src, held) + (Step("as_partial", held, dst),)
        case Shard(), Partial():
            held = Layout(PARTIAL, src.ranks)
            return (Step("pad", src, held),) + route(held, dst)
    raise AssertionError(f"{src} -> {dst}")


def round_trip(src: Layout, dst: Layout) -> tuple[Step, ...]:
    """The steps of a redistribution, followed by the steps of its gradient."""
    return route(src, dst) + route(dst.dual, src.dual)


def meetings(program: Program) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields every set of ranks that communicates in a program, with its purpose, in one fixed order.

    Gradients have groups of their own: a rank that takes no part in a layer sends its zeros later than the
    others send their addends, and must not block other collectives meanwhile. Parameters stored in shards
    have their own groups too, because values computed from samples are awaited sooner.
    """
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for i in program.instructions:
        groups: list[tuple[str, tuple[int, ...]]] = []
        if i.is_redistribution:
            src, dst = layout(program, program.types[i.inputs[0]]), layout(program, i.type)
            groups = [(purpose_of(program, i), step.ranks) for step in round_trip(src, dst)]
        elif i.attr("sfb", False):
            groups = [("data", program.participants(i.type))]
        elif i.op == "param" and i.args[0] in program.copies:
            groups = [("gradient", c.ranks) for c in cells(program, program.copies[i.args[0]][0])]
        elif i.op == "param" and isinstance(i.type.placement, Replicate):
            groups = [("gradient", program.participants(i.type))]
        if i.op == "param" and program.levels is not None:
            sums = [program.levels.parts(ranks, program.levels.least_bytes) for _, ranks in groups]
            groups += [group for parts in sums if parts for group in level_groups(parts)]
        for purpose, ranks in groups:
            if len(ranks) > 1 and (purpose, ranks) not in seen:
                seen.add((purpose, ranks))
                yield purpose, ranks


def level_groups(parts: Parts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The groups for a hierarchical sum, with their purposes."""
    for part in parts:
        if len(part) > 1:
            yield from ((UP, part), (DOWN, part))
    yield BETWEEN, leaders(parts)
