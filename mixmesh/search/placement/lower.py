"""Lowers a strategy to an ordinary program, in which every group is data parallel under its own ratio.

Each operator keeps its placements from the data-parallel program; only the ratio, and so the participating
ranks, are its group's. Between groups of different ratios a value *moves*; gradients are synchronised by
attributes of the parameters, as in ZeRO.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ...errors import InputError
from ...lang.ir import (
    PARTIAL,
    REPLICATE,
    Instruction,
    Partial,
    Placement,
    Program,
    Ratio,
    Ref,
    Shard,
    TensorType,
    make_ratio,
    redistribution,
    support,
    with_inputs,
    with_rows_as_dealt,
)

SYNCS = ("allreduce", "sharded", "ps")


@dataclass(frozen=True)
class Placed:
    """How a group runs: the share of every rank (zero for ranks outside of it) and the synchronisation of its
    gradients.

    "allreduce" leaves all ranks with the sum. With "sharded" each rank gets the rows that it owns, in
    proportion to its share, updates them and passes them on. With "ps" the ``root`` owns all rows. Raises
    InputError for another ``sync``, or for a root that takes no part.
    """

    ratio: Ratio
    sync: str = "allreduce"
    root: int | None = None

    def __post_init__(self) -> None:
        if self.sync not in SYNCS:
            raise InputError("unknown synchronisation of gradients", expected=", ".join(SYNCS), got=self.sync)
        ranks = support(self.ratio)
        if (self.sync == "ps") != (self.root is not None) or self.root not in (None, *ranks):
            raise InputError(
                "a parameter server is one of the ranks that use it",
                expected=f"root among {', '.join(map(str, ranks))} with ps, none without",
                got=f"sync={self.sync!r}, root={self.root}",
            )

    @property
    def owners(self) -> Ratio | None:
        """The ratio of shard owners for gradients and optimizer state; None if all ranks keep all of them."""
        if self.sync == "allreduce" or len(support(self.ratio)) == 1:
            return None
        if self.sync == "sharded":
            return self.ratio
        assert self.root is not None  # a parameter server has a root
        return even_over((self.root,), len(self.ratio))


def lower(program: Program, placed: Mapping[str, Placed]) -> Program:
    """``program``, data parallel over all ranks, with every operator under the ratio given by the name of its
    first result. Operators without one, which have only constant inputs, run on all ranks in use.

    Raises InputError if a ratio is for another number of ranks.
    """
    for p in placed.values():
        if len(p.ratio) != program.world_size:
            raise InputError(
                "a ratio is for another number of ranks",
                expected=f"{program.world_size} shares",
                got=f"{len(p.ratio)} shares",
            )
    return _Lowering(program, placed).program()


ranks_of = lru_cache(maxsize=4096)(support)  # called tens of times per operator
Key = tuple[Placement, Ratio | tuple[int, ...]]  # for a value that is not cut, only its holders matter


def key_of(placement: Placement, ratio: Ratio) -> Key:
    return placement, ratio if isinstance(placement, Shard) else ranks_of(ratio)


@dataclass(frozen=True)
class _Form:
    """One form in which a value is held."""

    name: str
    placement: Placement
    ratio: Ratio


class _Lowering:
    def __init__(self, program: Program, placed: Mapping[str, Placed]) -> None:
        self.source, self.placed = program, placed
        self.value_of: dict[str, str] = {}  # name in the program -> the value, regardless of how it is held
        self.leaves: dict[str, Instruction] = {}
        for i in program.instructions:
            if i.is_redistribution:
                self.value_of[i.result] = self.value_of[i.inputs[0]]
            else:
                self.value_of.update((r, r) for r in i.results if r is not None)
                if i.is_leaf:
                    self.leaves[i.result] = i
        used = {r for p in placed.values() for r in ranks_of(p.ratio)}
        self.common = even_over(used or range(program.world_size), program.world_size)
        self.home: dict[str, Placed] = {}  # by value
        self.ratios: dict[Ratio, str] = {}
        self.held: dict[str, dict[Key, _Form]] = {}
        self.taken = set(self.value_of)
        self.out: list[Instruction] = []

    def program(self) -> Program:
        computations = [i for i in self.source.instructions if not (i.is_leaf or i.is_redistribution)]
        for i in computations:
            self.home.update((r, self.placed_of(i)) for r in i.results if r is not None)
        self.needs = self._needs(computations)
        for name, leaf in self.leaves.items():
            if leaf.op == "param" and name not in self.needs:
                # no operator uses it
                self.out.append(replace(leaf, types=(self._type(leaf, 0, self.common),)))
        for i in computations:
            if i.op != "output":
                self._computation(i, self._updated(i) if i.op == "update" else self.placed_of(i).ratio)
        loss = self.value_of[self.source.loss]
        result = self._need(loss, PARTIAL, self.home[loss].ratio)
        for i in computations:
            if i.op == "output":
                self._output(i)
        ratios = tuple((name, ratio) for ratio, name in self.ratios.items())
        lowered = Program(self.source.name, self.source.world_size, ratios, tuple(self.out), result)
        return with_rows_as_dealt(lowered)

    def _output(self, i: Instruction) -> None:
        """Adds an output: cut like the inputs if these are all cut alike, else whole on all ranks in use."""
        value, placement = self.value_of[i.inputs[0]], self.source.types[i.inputs[0]].placement
        batch = [self.held[name].values() for name, leaf in self.leaves.items() if leaf.op == "input"]
        cuts = {(form.placement, form.ratio) for forms in batch for form in forms}
        dealt = len(cuts) == 1 and isinstance(next(iter(cuts))[0], Shard)
        if dealt and isinstance(placement, Shard):
            ratio = next(iter(cuts))[1]
        else:
            placement, ratio = REPLICATE, self.common
        name = self._need(value, placement, ratio)
        self.out.append(replace(i, args=(i.args[0], Ref(name))))

    def _computation(self, i: Instruction, ratio: Ratio) -> None:
        names = [self.need(name, ratio) for name in i.inputs]
        args, kwargs = with_inputs(i.args, i.kwargs, names)
        types = tuple(self._type(i, n, ratio) for n in range(len(i.types)))
        for name, t in zip(i.results, types):
            if name is not None:
                self._hold(name, name, t.placement, ratio)
        self.out.append(replace(i, types=types, args=args, kwargs=kwargs))
        for name in i.results:
            if name is None:
                continue
            # sent as soon as it is ready, awaited where it is used; first to its own group
            needed = [(p, placed.ratio) for p, placed in self.needs.get(name, {}).values()]
            for placement, other in sorted(needed, key=lambda need: need[1] != ratio):
                self._need(name, placement, other)

    def placed_of(self, i: Instruction) -> Placed:
        name = next((r for r in i.results if r is not None), "")
        return self.placed.get(name) or Placed(self.common)

    def _updated(self, i: Instruction) -> Ratio:
        """The ratio of a buffer's update: the ranks that read the buffer compute it."""
        for name, leaf in self.leaves.items():
            if leaf.op == "buffer" and leaf.args == i.args[:1] and name in self.needs:
                return self._over(self.needs[name].values())
        return self.common

    def _over(self, needed: Iterable[tuple[Placement, Placed]]) -> Ratio:
        """A ratio in which all ranks take part that need a leaf."""
        ratios = {placed.ratio for _, placed in needed}
        if len(ratios) == 1:
            return ratios.pop()
        return even_over({r for ratio in ratios for r in ranks_of(ratio)}, self.source.world_size)

    def _needs(self, computations: list[Instruction]) -> dict[str, dict[Key, tuple[Placement, Placed]]]:
        """For each value, the placements in which it is needed, and by which operators."""
        needs: dict[str, dict[Key, tuple[Placement, Placed]]] = {}
        for i in computations:
            if i.is_sink:
                continue
            placed = self.placed_of(i)
            for name in i.inputs:
                placement = self.source.types[name].placement
                key = key_of(placement, placed.ratio)
                needs.setdefault(self.value_of[name], {})[key] = (placement, placed)
        for i in computations:
            value = self.value_of[i.inputs[0]] if i.is_sink else ""
            if value in self.leaves and value not in needs:
                # nothing else reads it: for instance an input that is kept in a buffer
                needs[value] = {key_of(REPLICATE, self.common): (REPLICATE, Placed(self.common))}
        return needs

    def need(self, name: str, ratio: Ratio) -> str:
        """The name of a value under ``ratio``, with its placement from the source program."""
        return self._need(self.value_of[name], self.source.types[name].placement, ratio)

    def _need(self, value: str, placement: Placement, ratio: Ratio) -> str:
        if value in self.leaves and value not in self.held:
            self._load(value)
        held_name = self.held[value].get(key_of(placement, ratio))
        if held_name is not None:
            return held_name.name
        if isinstance(placement, Partial) and not any(p == REPLICATE for p, _ in self.held[value]):
            self._need(value, REPLICATE, ratio)  # an addend does not move
        return self._convert(value, placement, ratio)

    def _load(self, value: str) -> None:
        """Loads a leaf once: in the placement that is needed, or whole if several are needed."""
        leaf, needed = self.leaves[value], self.needs[value].values()
        placement, placed = next(iter(needed))
        if leaf.op == "const" or len(needed) > 1 or isinstance(placement, Partial):
            placement = REPLICATE
        ratio, attrs = self._over(needed), leaf.attrs
        is_summed = leaf.op == "param" and leaf.type.value.shape and value in self.source.requires_grad
        # the gradient of a cut parameter is only on its own rank, so no shard owner is needed
        if is_summed and placement == REPLICATE and placed.owners is not None:
            attrs += (("owned", self._ratio_name(placed.owners)), ("stage", 1))
        self._hold(value, value, placement, ratio)
        t = self._placed_type(leaf.type, placement, ratio)
        self.out.append(replace(leaf, results=(value,), types=(t,), attrs=attrs))

    def _convert(self, value: str, placement: Placement, ratio: Ratio) -> str:
        source = min(self.held[value].values(), key=lambda form: _effort(form, placement, ratio))
        ends = (source.placement, source.ratio), (placement, ratio)
        cuts = {r for p, r in ends if isinstance(p, Shard)}
        moves = ranks_of(source.ratio) != ranks_of(ratio) or len(cuts) > 1
        name = self._fresh(value, placement)
        t = self._placed_type(self.source.types[value], placement, ratio)
        self._hold(value, name, placement, ratio)
        op = "move" if moves else redistribution(source.placement, placement)
        self.out.append(Instruction((name,), (t,), op, (Ref(source.name),)))
        return name

    def _hold(self, value: str, name: str, placement: Placement, ratio: Ratio) -> None:
        self.held.setdefault(value, {})[key_of(placement, ratio)] = _Form(name, placement, ratio)

    def _type(self, i: Instruction, n: int, ratio: Ratio) -> TensorType:
        return self._placed_type(i.types[n], i.types[n].placement, ratio)

    def _placed_type(self, t: TensorType, placement: Placement, ratio: Ratio) -> TensorType:
        """The type of a placed value; it names a ratio only if that matters."""
        named = isinstance(placement, Shard) or not all(ratio)
        return TensorType(t.value, placement, self._ratio_name(ratio) if named else None)

    def _ratio_name(self, ratio: Ratio) -> str:
        return self.ratios.setdefault(ratio, f"r{len(self.ratios)}")

    def _fresh(self, value: str, placement: Placement) -> str:
        suffix = f"s{placement.dim}" if isinstance(placement, Shard) else str(placement)[0].lower()
        name, count = f"{value}.{suffix}", 1
        while name in self.taken:
            count += 1
            name = f"{value}.{suffix}{count}"
        self.taken.add(name)
        return name


def even_over(ranks: Collection[int], world_size: int) -> Ratio:
    return make_ratio([1.0 if r in ranks else 0.0 for r in range(world_size)])


def _effort(form: _Form, placement: Placement, ratio: Ratio) -> tuple[bool, bool, bool]:
    """A key for choosing the form from which another is made: a whole copy is best, then the same cut, then a
    sum."""
    whole = form.placement == REPLICATE and {*ranks_of(ratio)} <= {*ranks_of(form.ratio)}
    return (not whole, form.placement != placement, isinstance(form.placement, Partial))
