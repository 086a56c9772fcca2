"""Where a tensor stands in a program over one ratio, and the search with its placement forced.

The search is the planner's, at the same prices and under the plan's ratio, with one difference: a value may
only be made, a leaf only be loaded, as it is asked to be. The consequences for the rest of the program
are the search's to find; later redistributions of the tensor are free to it. It is also asked for the program
in which all other tensors stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator

from ..cost import CostModel
from ..lang.ir import Graph, Program, Ratio, support
from ..lang.optimizer_states import OptimizerStates
from ..planner.hap import GRADIENT_PRICES, WEIGHT, most_states
from ..search.baselines import DATA_PARALLEL, fully_sharded
from ..search.ratios import with_ratio
from ..search.synthesis import Choices, NoProgram, Prices, Problem, emit, search
from ..search.synthesis.choices import P, R, code_of
from .reasons import why_not

PRICES = (None, *GRADIENT_PRICES)  # for a second of gradient sums; None is data parallelism
KEPT = "kept"  # in place of a price: everything else as in the plan
Programs = dict[Hashable, Program]  # by price


class Place:
    """A tensor of a program (``names``: with those in its place in other layers), on the ranks of a ratio.
    Of the program's values those that are ``fixed`` are made as they are, whatever is asked."""

    def __init__(
        self,
        program: Program,
        ratio: Ratio,
        costs: CostModel,
        names: tuple[str, ...],
        optimizer_states: OptimizerStates,
        prices: Iterable[float | None] = PRICES,
        fixed: Collection[str] = (),
        like: Place | None = None,
    ) -> None:
        """``like`` is a place of the same tensors in an equal program on as many equal ranks."""
        self.graph, self.ratio, self.costs = program.graph, ratio, costs
        self.optimizer_states, self.prices = optimizer_states, prices
        self.like = like
        # a value of one layer alone is forced in that layer alone: then no two layers are equal
        self.choices = (
            like.choices
            if like is not None
            else Choices(self.graph, costs, folded=len(names) > 1 and not fixed)
        )
        ids = self.choices.ids
        self.values = tuple(ids[n] for n in names if n in ids)
        self.names, self.name = names, names[0]
        if self.name not in ids:  # its layer is folded: another stands for it
            self.name = self.choices.names[self.values[0]]
        self.own = held_as(program, self.graph, names[0])
        self.kept = {ids[n]: code for n, code in all_held(program).items() if n in ids}
        self.fixed = {ids[n]: self.kept[ids[n]] for n in fixed}
        self._searched: dict[int, Programs] = {}

    @property
    def codes(self) -> Iterable[int]:
        """Every placement: R, S(d) for every dim, P."""
        return (R, *range(2, 2 + len(self.graph.types[self.name].shape)), P)

    @property
    def is_param(self) -> bool:
        return self.graph.producers[self.name].op == "param"

    def searched(self, code: int) -> Programs:
        """The cheapest program at every price that has one with the tensor as ``code``."""
        if code not in self._searched and self.like is not None:
            alike = self.like.searched(code).items()
            self._searched[code] = {key: with_ratio(p, "r0", self.ratio) for key, p in alike}
        elif code not in self._searched:
            self._searched[code] = dict(self._search(code))
        return self._searched[code]

    def _search(self, code: int) -> Iterator[tuple[Hashable, Program]]:
        for price in (KEPT, *self.prices):
            problem = self.problem(code, price)
            leaves = [value for value in self.values if value in problem.leaves]
            if not all(problem.options) or any(problem.load(value, code) is None for value in leaves):
                continue
            limit = most_states(problem)
            try:
                yield price, emit(problem, search(problem, weight=WEIGHT, max_states=limit))
            except NoProgram:
                continue

    def stored(self, code: int) -> Programs:
        """Programs that use a parameter whole, gathered ahead of that, where it is asked for in rows."""
        if code != 2 or not self.is_param or len(support(self.ratio)) == 1:
            return {}
        sharded = {price: fully_sharded(p, self.names) for price, p in self.searched(R).items()}
        return {price: p for price, p in sharded.items() if held_as(p, self.graph, self.name) == code}

    def possible(self, code: int) -> bool:
        return bool(self.searched(code) or self.stored(code))

    def problem(self, code: int, price: float | str | None) -> Problem:
        """The search problem with the placement forced; without a price that of data parallelism."""
        return Problem(
            self.graph,
            self.costs,
            self.ratio,
            prices=DATA_PARALLEL if price is None else Prices(gradient_sync=1.0 if price == KEPT else price),
            optimizer_states=self.optimizer_states,
            shard_params=price is not None,
            batch_only=price is None,
            choices=self.choices,
            forced={**(self.kept if price == KEPT else self.fixed), **dict.fromkeys(self.values, code)},
        )

    def impossible(self, code: int) -> str:
        """Why no program holds the tensor so."""
        ranks = support(self.ratio)
        if len(ranks) == 1 and code != self.own:
            return f"rank {ranks[0]} works alone: there is nothing to share out"
        plain = self.problem(code, GRADIENT_PRICES[0])
        reasons = (why_not(plain, plain.names[value], code) for value in self.values)
        return next(filter(None, reasons), "no program of the whole model has it so")


def held_as(program: Program, graph: Graph, name: str) -> int:
    """How a program makes or loads a tensor of its graph."""
    node = graph.producers[name]
    if not node.is_leaf:
        return code_of(program.types[name].placement)
    (leaf,) = (i for i in program.instructions if i.op == node.op and i.args == node.args)
    return code_of(leaf.type.placement)


def all_held(program: Program) -> dict[str, int]:
    """``held_as`` of all tensors of the program's graph."""
    makers = [i for i in program.instructions if not i.is_redistribution]
    return {r: code_of(t.placement) for i in makers for r, t in zip(i.results, i.types) if r is not None}
