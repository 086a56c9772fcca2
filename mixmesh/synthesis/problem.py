"""The search problem of one graph, cluster and ratio: options, conversions and their prices.

Everything that the search needs is worked out here as numbers, so that the search itself knows states
and prices only. Placements are coded as small integers: R is 0, P(sum) is 1, S(d) is 2 + d.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..cost import CostModel
from ..ir import PARTIAL, REPLICATE, Graph, Node, Placement, Ratio, Shard, ValueType, shard_sizes, support
from ..rules import RULES, Call, Rule, Strategy, Units, call_of, shard_units, strategies

R, P = 0, 1
INPUT_BYTES_PER_S = 5e9  # from the loader to the device: between pageable and pinned copies over PCIe
Vector = tuple[float, ...]  # seconds per class of ranks
Need = tuple[int, int]  # (value, placement code)


def code_of(placement: Placement) -> int:
    if isinstance(placement, Shard):
        return 2 + placement.dim
    return P if placement == PARTIAL else R


@dataclass(frozen=True, slots=True)
class Option:
    """One way to execute a step: what it needs, what it gives, what it costs each class."""

    needs: tuple[Need, ...]
    gives: tuple[Need, ...]
    forward: Vector
    backward: Vector
    strategy: Strategy | None


@dataclass(frozen=True, slots=True)
class Load:
    """The price of holding a leaf: a synchronisation of the gradient, an optimizer step per class."""

    sync_s: float
    optimizer: Vector


@dataclass(frozen=True, slots=True)
class Prices:
    """What the additive cost of the search charges for effects that only the simulator sees.

    ``gradient_sync``: of a second of gradient communication, below 1 where it hides behind the
    backward pass. ``byte_s``: seconds charged per byte that the fullest rank must hold.
    """

    gradient_sync: float = 1.0
    byte_s: float = 0.0


class Problem:
    """Steps in topological order with their options, for ranks grouped into classes that cost alike."""

    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        ratio: Ratio,
        *,
        prices: Prices | None = None,
        rules: dict[str, Rule] | None = None,
        units: Units | None = None,
        optimizer_states: int = 2,
        shard_params: bool = True,
    ) -> None:
        self.graph, self.costs, self.ratio = graph, costs, ratio
        self.prices = prices or Prices()
        self.rules = RULES if rules is None else rules
        self.units = units if units is not None else shard_units(graph, self.rules)
        self.optimizer_states = optimizer_states
        self.shard_params = shard_params  # False: parameters are replicated, as in data parallelism
        self._loads: dict[Need, Load | None] = {}
        self._converts: dict[tuple[int, int, int], tuple[float, float] | None] = {}
        self.ranks = support(ratio)
        self.names = tuple(graph.types)
        self.ids = {name: n for n, name in enumerate(self.names)}
        self.types: tuple[ValueType, ...] = tuple(graph.types[n] for n in self.names)
        self.steps: tuple[Node, ...] = tuple(n for n in graph.nodes if not n.is_leaf)
        self.options: tuple[tuple[Option, ...], ...] = tuple(map(self._options, self.steps))

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """One rank for each class: ranks of equal devices and equal shares cost the same."""
        seen: dict[tuple, int] = {}
        for rank in self.ranks:
            seen.setdefault((self.costs.class_of[rank], self.ratio[rank]), rank)
        return tuple(seen.values())

    @cached_property
    def uses(self) -> tuple[int, ...]:
        """The last step that uses each value (-1: none); the loss is used by the end."""
        last = [-1] * len(self.names)
        for n, step in enumerate(self.steps):
            for name in step.inputs:
                last[self.ids[name]] = n
        last[self.ids[self.graph.loss]] = len(self.steps)
        return tuple(last)

    @cached_property
    def use_counts(self) -> dict[str, int]:
        counts: dict[str, int] = dict.fromkeys(self.names, 0)
        for step in self.steps:
            for name in step.inputs:
                counts[name] += 1
        return counts

    @cached_property
    def varying(self) -> frozenset[str]:
        """Values that depend on the batch or on parameters; the rest are cheap constants, held whole."""
        out: set[str] = set()
        for node in self.graph.nodes:
            if node.op in ("input", "param") or any(name in out for name in node.inputs):
                out.update(r for r in node.results if r is not None)
        return frozenset(out)

    @cached_property
    def leaves(self) -> dict[int, Node]:
        return {self.ids[n.result]: n for n in self.graph.nodes if n.is_leaf}

    @cached_property
    def tracked(self) -> frozenset[int]:
        """Values whose held placements matter later: all but leaves that are used once or cost nothing."""
        skip = {
            v
            for v, n in self.leaves.items()
            if n.op != "param" or self.use_counts[n.result] <= 1
        }  # fmt: skip
        return frozenset(range(len(self.names))) - skip

    def placement(self, value: int, code: int) -> Placement:
        if code == R:
            return REPLICATE
        if code == P:
            return PARTIAL
        return Shard(code - 2, self.units[self.names[value]][code - 2])

    def shares(self, value: int, code: int) -> Ratio:
        """The share of the tensor that each rank holds, as integer sizes make it."""
        if code < 2:
            return tuple(1.0 if r > 0 else 0.0 for r in self.ratio)
        dim = code - 2
        size = self.types[value].shape[dim]
        sizes = shard_sizes(size, self.ratio, self.units[self.names[value]][dim])
        return tuple(n / size for n in sizes)

    def can_shard(self, value: int, dim: int) -> bool:
        size = self.types[value].shape[dim]
        unit = self.units[self.names[value]][dim]
        return size % unit == 0 and size // unit >= min(2, len(self.ranks))

    def _options(self, node: Node) -> tuple[Option, ...]:
        zeros = (0.0,) * len(self.classes)
        ids = self.ids
        if node.op == "update":
            return (Option(((ids[node.inputs[0]], R),), (), zeros, zeros, None),)
        call = call_of(node, self.graph.types)
        grads = sum(1 for name in dict.fromkeys(node.inputs) if name in self.graph.requires_grad)
        rule = self.rules.get(node.op)
        allowed = strategies(rule, call) if rule is not None else ()
        if not any(r in self.varying for r in node.results):
            allowed = allowed[:1]  # constants are cheap and the same everywhere
        if not allowed:
            allowed = (Strategy("", (REPLICATE,) * len(node.inputs), (REPLICATE,) * len(node.results)),)
        options: dict[tuple, Option] = {}
        for strategy in allowed:
            made = self._option(node, call, grads, strategy)
            if made is not None:
                options.setdefault((made.needs, made.gives), made)
        return tuple(options.values())

    def _option(self, node: Node, call: Call, grads: int, strategy: Strategy) -> Option | None:
        needs = tuple((self.ids[n], code_of(p)) for n, p in zip(node.inputs, strategy.inputs))
        gives = tuple(
            (self.ids[n], code_of(p)) for n, p in zip(node.results, strategy.outputs) if n is not None
        )
        sharded = next((n for n in gives + needs if n[1] >= 2), None)
        if any(c >= 2 and not self.can_shard(v, c - 2) for v, c in needs + gives):
            return None
        shares = self.shares(*sharded) if sharded else self.shares(0, R)
        forward, backward = [], []
        for rank in self.classes:
            time = self.costs.op(call, grads, self.costs.class_of[rank])
            forward.append(time.forward.at(shares[rank]))
            backward.append(time.backward.at(shares[rank]))
        return Option(tuple(dict.fromkeys(needs)), gives, tuple(forward), tuple(backward), strategy)

    def load(self, value: int, code: int) -> Load | None:
        """The price of holding a leaf as ``code``; None if it cannot be held so."""
        key = (value, code)
        if key not in self._loads:
            self._loads[key] = self._load(value, code)
        return self._loads[key]

    def _load(self, value: int, code: int) -> Load | None:
        node = self.leaves[value]
        zeros = (0.0,) * len(self.classes)
        if code == P or (code >= 2 and not self.can_shard(value, code - 2)):
            return None
        if code != R and (node.op == "const" or (node.op == "param" and not self.shard_params)):
            return None
        if node.op != "param":
            # a share of a batch is cheaper to load than all of it, by a little
            read = max(self.shares(value, code)) * self.types[value].size_bytes / INPUT_BYTES_PER_S
            return Load(read, zeros)
        size, shares = self.types[value].size_bytes, self.shares(value, code)
        states = 2 + self.optimizer_states
        held = max(shares) * size * states * self.prices.byte_s
        if node.result not in self.graph.requires_grad:
            return Load(max(shares) * size * self.prices.byte_s, zeros)
        optimizer = tuple(self.costs.optimizer_s(r, size * shares[r]) for r in self.classes)
        if code >= 2:
            return Load(held, optimizer)
        # latency is shared by the parameters of a bucket, so only the bytes count here
        sync = self.costs.collective("all_reduce", self.ranks).s_per_byte * size
        return Load(sync * self.prices.gradient_sync + held, optimizer)

    def convert(self, value: int, src: int, dst: int) -> tuple[float, float] | None:
        """Seconds of ``src -> dst`` forward and in the backward pass; None if it is not allowed."""
        key = (value, src, dst)
        if key not in self._converts:
            self._converts[key] = self._convert(value, src, dst)
        return self._converts[key]

    def _convert(self, value: int, src: int, dst: int) -> tuple[float, float] | None:
        if src == dst:
            return 0.0, 0.0
        if dst >= 2 and not self.can_shard(value, dst - 2):
            return None
        if src == R or dst == P:
            return (0.0, 0.0) if dst != R else None
        if dst == R:
            name = "all_reduce" if src == P else "all_gather"
        else:
            name = "reduce_scatter" if src == P else "all_to_all"
        size = self.types[value].size_bytes
        dual = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(name, name)
        forward = self.costs.collective(name, self.ranks).seconds(size)
        if self.names[value] not in self.graph.requires_grad:
            return forward, 0.0
        return forward, self.costs.collective(dual, self.ranks).seconds(size)
