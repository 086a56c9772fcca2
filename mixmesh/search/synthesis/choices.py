"""The choices of every step of a graph, for any ratio and prices: made once, shared by problems.

Placements are coded as small integers: R is 0, P(sum) is 1, S(d) is 2 + d.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...base.lazy import lazy
from ...cost import CostModel, OpTime
from ...lang.ir import (
    PARTIAL,
    REPLICATE,
    Graph,
    Node,
    Placement,
    Shard,
    ValueType,
    batch_size_of,
    has_rows,
)
from ...lang.rules import RULES, Rule, Strategy, Units, call_key, call_of, shard_units, strategies
from .fold import Fold, fold, unfolded
from .lives import Lives, lives_of

R, P = 0, 1
# cutting a smaller value without samples does not pay: a whole value can be cut at no cost
SMALL_BYTES = 2**16
Need = tuple[int, int]  # (value, placement code)


def code_of(placement: Placement) -> int:
    if isinstance(placement, Shard):
        return 2 + placement.dim
    return P if placement == PARTIAL else R


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to execute a step. ``work`` is the (value, code) whose share is the share of the work; None if
    every rank does all of it. ``kind`` is the index of its times in ``Choices.timed``; None for an update or
    an output."""

    needs: tuple[Need, ...]
    gives: tuple[Need, ...]
    work: Need | None
    strategy: Strategy | None
    kind: int | None = None


class Choices:
    """Steps in topological order with their choices and the times of their operators.

    Repeated blocks are folded (``fold.py``): ``graph`` is the folded graph, ``fold.whole`` the one given.
    """

    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        rules: dict[str, Rule] | None = None,
        units: Units | None = None,
        *,
        folded: bool = True,
    ) -> None:
        self.fold: Fold = fold(graph) if folded else unfolded(graph)
        graph = self.fold.graph
        self.graph, self.costs = graph, costs
        self.rules = RULES if rules is None else rules
        self.units = units if units is not None else shard_units(graph, self.rules)
        self.names = tuple(graph.types)
        self.ids = {name: n for n, name in enumerate(self.names)}
        self.types: tuple[ValueType, ...] = tuple(graph.types[n] for n in self.names)
        self.steps: tuple[Node, ...] = tuple(n for n in graph.nodes if not n.is_leaf)
        self.inputs = tuple(n.inputs for n in self.steps)
        self.values = tuple(tuple(self.ids[name] for name in names) for names in self.inputs)
        self.options: dict[tuple, tuple] = {}  # cached for problems, by everything they depend on
        self._strategies: dict[tuple, tuple[Strategy, ...]] = {}
        self._kinds: dict[tuple, int] = {}
        self.timed: list[tuple[OpTime, ...]] = []  # per kind, the times on each class of devices
        self.kind_of_step: list[int | None] = []  # for each step; None for an update or an output
        self._sample_dims = self._tied_to_samples()
        self.choices = tuple(self._choices(n) for n in self.steps)

    @lazy
    def varying(self) -> frozenset[str]:
        """Values that depend on the batch or on parameters; the rest are cheap constants, held whole."""
        out: set[str] = set()
        for node in self.graph.nodes:
            if node.op in ("input", "param") or any(name in out for name in node.inputs):
                out.update(r for r in node.results if r is not None)
        return frozenset(out)

    @lazy
    def leaves(self) -> dict[int, Node]:
        return {self.ids[n.result]: n for n in self.graph.nodes if n.is_leaf}

    @lazy
    def uses(self) -> tuple[int, ...]:
        """The last step that uses each value (-1: none); the loss is used by the end."""
        last = [-1] * len(self.names)
        for n, inputs in enumerate(self.inputs):
            for name in inputs:
                last[self.ids[name]] = n
        last[self.ids[self.graph.loss]] = len(self.steps)
        return tuple(last)

    @lazy
    def first_uses(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for n, inputs in enumerate(self.inputs):
            for name in inputs:
                first.setdefault(self.ids[name], n)
        return first

    @lazy
    def lives(self) -> Lives:
        return lives_of(self)

    @lazy
    def parents(self) -> tuple[int | None, ...]:
        """For each step, the largest of its computed inputs, the last among equal ones; None if there is
        none."""
        types = self.types  # values are numbered in the order of computation
        computed = ([v for v in values if v not in self.leaves] for values in self.values)
        return tuple(max(some, key=lambda v: (types[v].size_bytes, v), default=None) for some in computed)

    @lazy
    def tracked(self) -> frozenset[int]:
        """Values whose held placements matter later: all but leaves that are used once or cost nothing."""
        counts: dict[int, int] = {}
        for inputs in self.inputs:
            for name in inputs:
                counts[self.ids[name]] = counts.get(self.ids[name], 0) + 1
        skip = {v for v, n in self.leaves.items() if n.op != "param" or counts.get(v, 0) <= 1}
        return frozenset(range(len(self.names))) - skip

    def is_loaded(self, value: int, step: int) -> bool:
        """Whether a value is a leaf that this step loads: every step that uses it does, but if the value's
        placements are tracked, only the first one."""
        return value in self.leaves and (value not in self.tracked or self.first_uses[value] == step)

    @lazy
    def value_weights(self) -> tuple[float, ...]:
        """The least number of times that a conversion of each value counts: the least over the steps."""
        out = [float("inf")] * len(self.names)
        for weight, inputs in zip(self.fold.weights, self.inputs):
            for name in inputs:
                out[self.ids[name]] = min(out[self.ids[name]], weight)
        return tuple(out)

    def shifts(self, step: int, other: int, count: int) -> dict[int, int]:
        """Maps the values of ``count`` steps from ``step`` on to the corresponding values from ``other``
        on."""
        out: dict[int, int] = {}
        for a, b in zip(range(step, step + count), range(other, other + count)):
            for name, there in zip(
                (*self.inputs[a], *self.steps[a].results), (*self.inputs[b], *self.steps[b].results)
            ):
                if name is not None and there is not None:
                    out[self.ids[name]] = self.ids[there]
        return out

    @lazy
    def kinds(self) -> tuple[int, ...]:
        """Per value, a number shared by values that convert alike: same bytes, dims to cut, gradient."""
        numbers: dict[tuple, int] = {}
        out = []
        for value, t in enumerate(self.types):
            cuts = tuple(self.can_shard(value, 2 + d) for d in range(len(t.shape)))
            kind = (t.size_bytes, cuts, self.names[value] in self.graph.requires_grad)
            out.append(numbers.setdefault(kind, len(numbers)))
        return tuple(out)

    def unit(self, value: int, dim: int) -> int:
        return self.units[self.names[value]][dim]

    def placement(self, value: int, code: int) -> Placement:
        if code == R:
            return REPLICATE
        return PARTIAL if code == P else Shard(code - 2, self.unit(value, code - 2))

    def can_shard(self, value: int, code: int) -> bool:
        """Whether the dim can be cut into at least two pieces."""
        size, unit = self.types[value].shape[code - 2], self.unit(value, code - 2)
        return unit > 0 and size % unit == 0 and size // unit >= 2

    def _allowed(self, node: Node) -> tuple[Strategy, ...]:
        call = call_of(node, self.graph.types)
        key = call_key(call)
        if key not in self._strategies:
            rule = self.rules.get(node.op)
            options = strategies(rule, call) if rule is not None else ()
            whole = Strategy("", (REPLICATE,) * len(node.inputs), (REPLICATE,) * len(node.results))
            self._strategies[key] = options or (whole,)
        return self._strategies[key]

    def _tied_to_samples(self) -> frozenset[tuple[str, int]]:
        """Dims, as (value, dim), that are cut if the batch is cut between samples: dim 0 of every input, and
        the dims that operators tie to it."""
        ties: dict[tuple[str, int], list[tuple[tuple[str, int], ...]]] = {}
        for node in self.steps:
            for strategy in self._allowed(node) if not node.is_sink else ():
                placed = [*zip(node.inputs, strategy.inputs), *zip(node.results, strategy.outputs)]
                tie = tuple((n, p.dim) for n, p in placed if n is not None and isinstance(p, Shard))
                for end in tie:
                    ties.setdefault(end, []).append(tie)
        reached = {(n.result, 0) for n in self.graph.batch_inputs if n.types[0].shape}
        waiting = list(reached)
        while waiting:
            for tie in ties.get(waiting.pop(), ()):
                waiting += [end for end in tie if end not in reached]
                reached.update(tie)
        return frozenset(reached)

    def _choices(self, node: Node) -> tuple[Choice, ...]:
        ids = self.ids
        if node.op == "update":
            self.kind_of_step.append(None)
            return (Choice(((ids[node.inputs[0]], R),), (), None, None),)
        if node.op == "output":
            self.kind_of_step.append(None)
            return tuple(Choice(((ids[node.inputs[0]], c),), (), None, None) for c in self._shown(node))
        call = call_of(node, self.graph.types)
        grads = sum(1 for name in dict.fromkeys(node.inputs) if name in self.graph.requires_grad)
        key = call_key(call)

        def kind(cut: str = "") -> int:
            number = self._kinds.setdefault((key, grads, cut), len(self.timed))
            if number == len(self.timed):
                classes = range(len(self.costs.classes))
                self.timed.append(tuple(self.costs.op(call, grads, c, cut) for c in classes))
            return number

        self.kind_of_step.append(kind())
        allowed = self._allowed(node)
        if all(map(self._is_minor, (*node.inputs, *(r for r in node.results if r is not None)))):
            # batch statistics, scales, position tables: cutting them only multiplies the states
            allowed = tuple(s for s in allowed if not s.is_sharded or PARTIAL in s.outputs)
        if not any(r in self.varying for r in node.results):
            allowed = allowed[:1]  # constants are cheap, and the same everywhere
        options: dict[tuple, Choice] = {}
        for strategy in allowed:
            choice = self._choice(node, strategy, kind(self.costs.cut(call, strategy.inputs)))
            if choice is not None:
                options.setdefault((choice.needs, choice.gives), choice)
        return tuple(options.values())

    def _shown(self, node: Node) -> tuple[int, ...]:
        """The ways to hold an output: whole, or by its rows if they can be cut like the batch."""
        name = node.inputs[0]
        inputs = [n for n in self.graph.batch_inputs if n.types[0].shape]
        batch_size = batch_size_of(n.types[0] for n in inputs)
        if not has_rows(node) or (name, 0) not in self._sample_dims:
            return (R,)
        each = self.graph.types[name].shape[0] // batch_size
        wanted = {each * self.units[n.result][0] for n in inputs if n.types[0].shape[0] == batch_size}
        alike = wanted == {self.units[name][0]} and self.can_shard(self.ids[name], 2)
        return (2, R) if alike else (R,)

    def deals_samples(self, need: Need) -> bool:
        """Whether a placement cuts nothing, or cuts a value between samples."""
        value, code = need
        return code < 2 or (self.names[value], code - 2) in self._sample_dims

    def _is_minor(self, name: str) -> bool:
        t = self.graph.types[name]
        samples = any((name, dim) in self._sample_dims for dim in range(len(t.shape)))
        return t.size_bytes <= SMALL_BYTES and not samples

    def _choice(self, node: Node, strategy: Strategy, kind: int) -> Choice | None:
        needs = tuple((self.ids[n], code_of(p)) for n, p in zip(node.inputs, strategy.inputs))
        gives = tuple(
            (self.ids[n], code_of(p)) for n, p in zip(node.results, strategy.outputs) if n is not None
        )
        if any(c >= 2 and not self.can_shard(v, c) for v, c in needs + gives):
            return None
        work = next((n for n in gives + needs if n[1] >= 2), None)
        return Choice(tuple(dict.fromkeys(needs)), gives, work, strategy, kind)
