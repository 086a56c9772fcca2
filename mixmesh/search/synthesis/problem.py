"""The search problem of one graph, cluster and ratio: options, conversions and their prices.

Everything that the search needs is computed here as numbers, so that the search itself deals only with states
and prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from ...base.lazy import lazy
from ...cost import CostModel
from ...lang.ir import Graph, Placement, Ratio, shard_sizes, support
from ...lang.optimizer_states import ADAM, OptimizerStates
from ...lang.rules import Rule, Strategy, Units
from .choices import Choice, Choices, Need, P, R

INPUT_BYTES_PER_S = 5e9  # from the loader to the device: between pageable and pinned copies over PCIe
# added to work that every rank repeats: measured curves are about this noisy, and at equal cost sharded
# execution also holds and moves less
REPEATED_WORK = 0.01
HIDDEN_PRICE = 0.01  # least price of a second of communication that no rank waits for
UNDEALT = 1e3  # price of a second of communication that moves samples, for data parallelism
Vector = tuple[float, ...]  # seconds per class of ranks


class Option(NamedTuple):
    """One way to execute a step: its needs, its results, and its cost for each class, in both passes
    ``seconds``. For the bound: the leaves that are loaded for it, and the mask of what it needs of the step's
    parent."""

    needs: tuple[Need, ...]
    gives: tuple[Need, ...]
    forward: Vector
    backward: Vector
    strategy: Strategy | None
    seconds: Vector
    loads: tuple[int, ...]
    of_parent: int


@dataclass(frozen=True, slots=True)
class Load:
    """The price of holding a leaf: a synchronisation of the gradient, and an optimizer step for each
    class."""

    sync_s: float
    optimizer: Vector


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices, in the search's additive cost, of effects that only the simulator sees.

    ``gradient_sync`` is the price of a second of communication that computing may hide (that of gradients,
    and of values that carry none); below 1 if it is hidden. ``byte_s``: seconds charged per byte held by the
    fullest rank. ``exchange`` is the price of a second of communication that ranks wait for; with a price far
    above 1, the search finds the program that communicates least.
    """

    gradient_sync: float = 1.0
    byte_s: float = 0.0
    exchange: float = 1.0


class Problem:
    """Steps in topological order with their options, for ranks grouped into classes of equal cost.

    ``shard_params=False`` replicates every parameter, as data parallelism does; ``batch_only`` loads inputs
    whole or cut along dim 0. ``forced`` gives values that may only be made, and leaves that may only be
    loaded, with the given code.
    """

    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        ratio: Ratio,
        *,
        prices: Prices | None = None,
        rules: dict[str, Rule] | None = None,
        units: Units | None = None,
        optimizer_states: OptimizerStates = ADAM,
        shard_params: bool = True,
        batch_only: bool = False,
        choices: Choices | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> None:
        self.choices = choices or Choices(graph, costs, rules, units)
        # steps of the kept blocks of the whole graph's repeated ones; each counts as often as its weight
        self.graph, self.weights = self.choices.graph, self.choices.fold.weights
        self.costs, self.ratio = costs, ratio
        self.prices = prices or Prices()
        self.optimizer_states = optimizer_states
        self.shard_params, self.batch_only = shard_params, batch_only
        self.forced = dict(forced or {})
        self._loads: dict[Need, Load | None] = {}
        self._converts: dict[tuple[int, int, int], tuple[float, float] | None] = {}
        self._shares: dict[tuple[int, int], Vector] = {}
        self.ranks = support(ratio)
        self.names, self.ids, self.types = self.choices.names, self.choices.ids, self.choices.types
        self.steps, self.leaves = self.choices.steps, self.choices.leaves
        self.uses, self.tracked = self.choices.uses, self.choices.tracked
        self._costs: dict[tuple, tuple[Vector, Vector]] = {}
        self.options = self._shared_options()

    @lazy
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """The classes of ranks with equal devices and equal shares, whose costs are the same."""
        classes: dict[tuple, list[int]] = {}
        for rank in self.ranks:
            classes.setdefault((self.costs.class_of[rank], round(self.ratio[rank], 4)), []).append(rank)
        return tuple(map(tuple, classes.values()))

    @lazy
    def nothing(self) -> Vector:
        return (0.0,) * len(self.classes)

    def placement(self, value: int, code: int) -> Placement:
        return self.choices.placement(value, code)

    def shares(self, value: int, code: int) -> Vector:
        """The largest share of the tensor that a rank of each class holds, as integer sizes make it."""
        if code < 2:
            return (1.0,) * len(self.classes)
        size, unit = self.types[value].shape[code - 2], self.choices.unit(value, code - 2)
        if (size, unit) not in self._shares:
            sizes = shard_sizes(size, self.ratio, unit)
            self._shares[size, unit] = tuple(max(sizes[r] for r in ranks) / size for ranks in self.classes)
        return self._shares[size, unit]

    def can_shard(self, value: int, code: int) -> bool:
        return len(self.ranks) > 1 and self.choices.can_shard(value, code)

    def _allowed(self, step: int) -> tuple[Choice, ...]:
        """The choices of a step; in data parallelism only those that cut between samples, if there are
        any."""
        choices = self.choices.choices[step]
        if not self.batch_only or len(self.ranks) == 1:
            return choices
        dealing = [c for c in choices if all(map(self.choices.deals_samples, c.needs + c.gives))]
        cutting = [c for c in dealing if any(code >= 2 for _, code in c.gives)]
        return tuple(cutting or dealing or choices)

    def _shared_options(self) -> tuple[tuple[Option, ...], ...]:
        """The options of every step. They contain no price, so that all problems with one ratio share
        them."""
        key = (self.ratio, self.batch_only)
        shared = self.choices.options if self.costs is self.choices.costs else {}
        if key not in shared:
            shared[key] = tuple(self._options(n) for n in range(len(self.steps)))
        if not self.forced:
            return shared[key]
        return tuple(tuple(o for o in options if self._as_forced(o)) for options in shared[key])

    def _as_forced(self, option: Option) -> bool:
        return all(self.forced.get(value, code) == code for value, code in option.gives)

    def _options(self, step: int) -> tuple[Option, ...]:
        options = []
        weight = self.weights[step]
        varying = any(r in self.choices.varying for r in self.steps[step].results)
        for choice in self._allowed(step):
            if len(self.ranks) == 1 and any(code != R for _, code in choice.needs + choice.gives):
                continue  # a single rank has nothing to cut
            if choice.kind is None:
                forward = backward = self.nothing
            else:
                shares = self.shares(*choice.work) if choice.work else self.shares(0, R)
                key = choice.kind, shares
                if key not in self._costs:
                    self._costs[key] = self._cost(self.choices.timed[choice.kind], shares)
                forward, backward = self._costs[key]
                if choice.work is None and varying:
                    forward = tuple(t * (1 + REPEATED_WORK) for t in forward)
                    backward = tuple(t * (1 + REPEATED_WORK) for t in backward)
            if weight != 1.0:
                forward = tuple(t * weight for t in forward)
                backward = tuple(t * weight for t in backward)
            parent = self.choices.parents[step]
            option = Option(
                choice.needs,
                choice.gives,
                forward,
                backward,
                choice.strategy,
                tuple(map(add, forward, backward)),
                tuple(dict.fromkeys(v for v, _ in choice.needs if self.choices.is_loaded(v, step))),
                sum(1 << code for v, code in dict.fromkeys(choice.needs) if v == parent),
            )
            options.append(option)
        return tuple(options)

    def _cost(self, times, shares: Vector) -> tuple[Vector, Vector]:
        devices = [self.costs.class_of[ranks[0]] for ranks in self.classes]
        return (
            tuple(times[d].forward.at(share) for d, share in zip(devices, shares)),
            tuple(times[d].backward.at(share) for d, share in zip(devices, shares)),
        )

    def load(self, value: int, code: int) -> Load | None:
        """The price of holding a leaf as ``code``; None if it cannot be held so."""
        key = (value, code)
        if key not in self._loads:
            self._loads[key] = self._load(value, code)
        return self._loads[key]

    def _can_hold_leaf(self, value: int, code: int) -> bool:
        """Whether a leaf may be held as ``code`` at all."""
        op = self.leaves[value].op
        if self.forced.get(value, code) != code or code == P:
            return False
        if code >= 2 and not self.can_shard(value, code):
            return False
        if code != R and (op == "const" or (op == "param" and not self.shard_params)):
            return False
        return not (self.batch_only and op == "input" and code > 2)

    def _load(self, value: int, code: int) -> Load | None:
        if not self._can_hold_leaf(value, code):
            return None
        node = self.leaves[value]
        size, shares = self.types[value].size_bytes, self.shares(value, code)
        if node.op == "input":
            # loading a share of a batch is slightly cheaper than loading all of it
            return Load(max(shares) * size / INPUT_BYTES_PER_S, self.nothing)
        if node.op != "param":
            return Load(max(shares) * size * self.prices.byte_s, self.nothing)
        if node.result not in self.graph.requires_grad:
            return Load(max(shares) * size * self.prices.byte_s, self.nothing)
        held = max(shares) * size * (2 + self.optimizer_states.kept) * self.prices.byte_s
        optimizer = tuple(
            self.costs.optimizer_s(ranks[0], size * share) for ranks, share in zip(self.classes, shares)
        )
        if code >= 2:
            return Load(held, optimizer)
        # the parameters of a bucket share its latency, so only the bytes count here
        sync = self.costs.sum_s_per_byte(self.ranks) * size
        return Load(sync * self.prices.gradient_sync + held, optimizer)

    def waits(self, value: int) -> bool:
        """Whether ranks wait for a collective on this value: they wait if a gradient passes it; collectives
        on values without a gradient overlap with computing."""
        return self.names[value] in self.graph.requires_grad

    def convert(self, value: int, src: int, dst: int) -> tuple[float, float] | None:
        """The priced seconds of ``src -> dst`` in the forward and the backward pass; None if it is not
        allowed."""
        key = (self.choices.kinds[value], src, dst)
        if key not in self._converts:
            self._converts[key] = self._convert(value, src, dst)
        return self._converts[key]

    def _convert(self, value: int, src: int, dst: int) -> tuple[float, float] | None:
        if src == dst:
            return 0.0, 0.0
        if dst >= 2 and not self.can_shard(value, dst):
            return None
        if src == R:
            return 0.0, 0.0
        if dst == P:
            return None  # whole tensors of zeros around a piece: legal, but never worth it
        if dst == R:
            name = "all_reduce" if src == P else "all_gather"
        else:
            name = "reduce_scatter" if src == P else "all_to_all"
        size = self.types[value].size_bytes
        dual = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(name, name)
        # samples stay on their ranks, even if moving them would save sums of statistics
        moved = UNDEALT if self.batch_only and src != P else 1.0
        forward = self.costs.collective(name, self.ranks).seconds(size) * moved
        if not self.waits(value):
            return forward * max(self.prices.gradient_sync, HIDDEN_PRICE), 0.0
        backward = self.costs.collective(dual, self.ranks).seconds(size) * moved
        price = self.prices.exchange
        return forward * price, backward * price
