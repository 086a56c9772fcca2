"""A tensor in a program over one ratio, and the search with its placement forced.

The search is the planner's, with its prices and the plan's ratio. But an operator may give the tensor, or a
leaf be loaded, only with the forced placement. The search adapts the rest of the program, and may
redistribute the tensor later. One more program is searched in which all other tensors keep their placements.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from enum import Enum

from ..cost import CostModel
from ..lang.ir import PARTIAL, REPLICATE, Graph, Placement, Program, Ratio, Shard, support
from ..lang.optimizer_states import OptimizerStates
from ..planner.hap import GRADIENT_PRICES, WEIGHT, most_states
from ..search.baselines import DATA_PARALLEL, fully_sharded
from ..search.synthesis import Choices, NoProgram, Prices, Problem, emit, search
from ..search.synthesis.choices import code_of
from .reasons import why_not

# the price of a second of gradient reductions; None stands for data parallelism
PRICES = (None, *GRADIENT_PRICES)
Programs = dict[Hashable, Program]  # one program per price
ROWS = Shard(0)


class Kept(Enum):
    """Stands for a price in rows where all other tensors keep their placements."""

    KEPT = "kept"


KEPT = Kept.KEPT
Price = float | None | Kept


@dataclass(frozen=True)
class Search:
    """The settings of a search: costs, the prices to try, and the values that are ``fixed``, which keep their
    placements in all programs."""

    costs: CostModel
    optimizer_states: OptimizerStates
    prices: tuple[float | None, ...] = PRICES
    fixed: frozenset[str] = frozenset()


class Place:
    """A tensor of a program on the ranks of a ratio; ``names`` also has its counterparts in other layers."""

    def __init__(
        self,
        program: Program,
        ratio: Ratio,
        names: tuple[str, ...],
        search: Search,
    ) -> None:
        self.graph, self.ratio, self.settings = program.graph, ratio, search
        # a value forced in only one layer makes that layer differ, so repeated layers are not folded
        folded = len(names) > 1 and not search.fixed
        self.choices = Choices(self.graph, search.costs, folded=folded)
        ids = self.choices.ids
        self.values = tuple(ids[n] for n in names if n in ids)
        self.names, self.name = names, names[0]
        if self.name not in ids:  # its layer is folded, and another represents it
            self.name = self.choices.names[self.values[0]]
        self.own = held_as(program, self.graph, names[0])
        self.kept = {ids[n]: code_of(held) for n, held in all_held(program).items() if n in ids}
        self.fixed = {ids[n]: self.kept[ids[n]] for n in search.fixed}
        self._first = self  # the place whose search results this and equal places share
        self._searched: dict[Placement, Programs] = {}

    def on(self, program: Program, ratio: Ratio) -> Place:
        """The same tensors in an equal program on equally many ranks of equal devices, where the search is
        the same."""
        twin = copy(self)
        twin.graph, twin.ratio, twin._searched = program.graph, ratio, {}
        return twin

    @property
    def placements(self) -> Iterable[Placement]:
        """Every placement: R, S(d) for every dim, P."""
        return (REPLICATE, *map(Shard, range(len(self.graph.types[self.name].shape))), PARTIAL)

    @property
    def is_param(self) -> bool:
        return self.graph.producers[self.name].op == "param"

    def searched(self, placement: Placement) -> Programs:
        """The cheapest program at each price with this placement of the tensor; a price without a program is
        left out."""
        if placement not in self._searched:
            first = self._first
            alike = self._search(placement) if first is self else first.searched(placement).items()
            self._searched[placement] = {key: p.with_shares(self.ratio) for key, p in alike}
        return self._searched[placement]

    def _search(self, placement: Placement) -> Iterator[tuple[Hashable, Program]]:
        for price in (KEPT, *self.settings.prices):
            problem = self.problem(placement, price)
            leaves = [value for value in self.values if value in problem.leaves]
            if not all(problem.options) or any(
                problem.load(value, code_of(placement)) is None for value in leaves
            ):
                continue
            limit = most_states(problem)
            try:
                yield price, emit(problem, search(problem, weight=WEIGHT, max_states=limit))
            except NoProgram:
                continue

    def stored(self, placement: Placement) -> Programs:
        """Programs that store a parameter in rows and gather it before they use it whole."""
        if placement != ROWS or not self.is_param or len(support(self.ratio)) == 1:
            return {}
        sharded = {price: fully_sharded(p, self.names) for price, p in self.searched(REPLICATE).items()}
        return {price: p for price, p in sharded.items() if held_as(p, self.graph, self.name) == ROWS}

    def possible(self, placement: Placement) -> bool:
        return bool(self.searched(placement) or self.stored(placement))

    def problem(self, placement: Placement, price: Price) -> Problem:
        """The search problem with the placement forced; without a price that of data parallelism."""
        prices = DATA_PARALLEL
        if price is not None:
            prices = Prices(gradient_sync=1.0 if isinstance(price, Kept) else price)
        return Problem(
            self.graph,
            self.settings.costs,
            self.ratio,
            prices=prices,
            optimizer_states=self.settings.optimizer_states,
            shard_params=price is not None,
            batch_only=price is None,
            choices=self.choices,
            forced={
                **(self.kept if price is KEPT else self.fixed),
                **dict.fromkeys(self.values, code_of(placement)),
            },
        )

    def impossible(self, placement: Placement) -> str:
        """The reason why no program has this placement; empty if one may."""
        ranks = support(self.ratio)
        if len(ranks) == 1 and placement != self.own:
            return f"rank {ranks[0]} works alone: there is nothing to share out"
        plain = self.problem(placement, GRADIENT_PRICES[0])
        reasons = (why_not(plain, plain.names[value], placement) for value in self.values)
        return next(filter(None, reasons), "no program of the whole model has it so")


def held_as(program: Program, graph: Graph, name: str) -> Placement:
    """The placement with which a program makes or loads a tensor of its graph, regardless of the unit."""
    node = graph.producers[name]
    if not node.is_leaf:
        return without_unit(program.types[name].placement)
    (leaf,) = (i for i in program.instructions if i.op == node.op and i.args == node.args)
    return without_unit(leaf.type.placement)


def without_unit(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def all_held(program: Program) -> dict[str, Placement]:
    """The placement with which a program makes or loads each tensor of its graph."""
    makers = [i for i in program.instructions if not i.is_redistribution]
    return {r: t.placement for i in makers for r, t in zip(i.results, i.types) if r is not None}
