"""Rules, one row per operator, and the strategies that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir import (
    PARTIAL,
    REPLICATE,
    Arg,
    Instruction,
    Node,
    Partial,
    Placement,
    Shard,
    TensorType,
    ValueType,
    nameless,
)
from .pattern import Bound, Dim, PatternMismatch, bind, parse_pattern


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator: its arguments and the logical types of its tensors."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    inputs: tuple[ValueType, ...]
    outputs: tuple[ValueType, ...]

    def arg(self, index: int, name: str = "", default: Arg = None) -> Arg:
        """An argument by position or by name."""
        if index < len(self.args):
            return self.args[index]
        return dict(self.kwargs).get(name, default)


Linear = str | tuple[tuple[int, ...], ...]
Arguments = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # (positional, by name)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator may be sharded.

    - ``pattern`` is rule text, or a function of the call that returns it, perhaps with the sizes of factors
      that the shapes leave open.
    - ``linear`` tells which inputs may be partial sums: ``"separately"`` (any one of them, the others
      replicated), ``"jointly"`` (all of them together), ``"first"`` (the first alone), or groups of
      positions; a function of the call where the arguments decide.
    - ``flops`` names the factors whose product is the number of multiply-adds, several products joined by
      ``+``, perhaps with a number; empty for an operator bound by memory.
    - ``local`` rewrites arguments that contain global sizes.
    - ``own`` are positions of results that each rank computes from its own shard and that are not summed: by
      the operator's definition they differ from rank to rank, although they have the placement R.
    """

    pattern: str | Callable[[Call], str | tuple[str, dict[str, int]]]
    linear: Linear | Callable[[Call], Linear] = ()
    flops: str | Callable[[Call], str] = ""
    local: Callable[[LocalCall], Arguments] | None = None
    own: tuple[int, ...] = ()

    def bound(self, call: Call) -> Bound:
        text, sizes = self.text(call)
        return bind(
            parse_pattern(text),
            tuple(t.shape for t in call.inputs),
            tuple(t.shape for t in call.outputs),
            sizes,
        )

    def text(self, call: Call) -> tuple[str, dict[str, int]]:
        pattern = self.pattern if isinstance(self.pattern, str) else self.pattern(call)
        return pattern if isinstance(pattern, tuple) else (pattern, {})

    def partial_groups(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """The groups of inputs that may be partial together, by position."""
        linear, num_inputs = self.linear, len(call.inputs)
        match linear(call) if callable(linear) else linear:
            case "separately":
                return tuple((i,) for i in range(num_inputs))
            case "jointly":
                return (tuple(range(num_inputs)),)
            case "first":
                return ((0,),) if num_inputs else ()
            case tuple(groups):
                return tuple(g for g in groups if all(i < num_inputs for i in g))
        raise ValueError(f"linear={linear!r}")


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A call as one rank makes it: with local shapes in addition to the global types."""

    call: Call
    in_placements: tuple[Placement, ...]
    out_placements: tuple[Placement, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]


# operators that take a mean, with the position of their reduction argument, for which 1 is the mean (None:
# always a mean)
MEANS = {
    "aten.mean": None, "aten.mean.dim": None,
    "aten.mse_loss": 2, "aten.l1_loss": 2, "aten.smooth_l1_loss": 2, "aten.huber_loss": 2,
    "aten.soft_margin_loss": 2, "aten.kl_div": 2, "aten.poisson_nll_loss": 5, "aten.hinge_embedding_loss": 3,
    "aten.margin_ranking_loss": 4, "aten.binary_cross_entropy": 3,
    "aten.binary_cross_entropy_with_logits": 4,
}  # fmt: skip


def mean_share(local: LocalCall) -> float | None:
    """The weight of a rank's mean in the mean over all ranks; None unless it is a mean over a cut dim."""
    call = local.call
    if call.op not in MEANS or not isinstance(local.out_placements[0], Partial):
        return None
    position = MEANS[call.op]
    if position is not None and call.arg(position, "reduction", 1) != 1:
        return None
    for placement, shape, value in zip(local.in_placements, local.in_shapes, call.inputs):
        if isinstance(placement, Shard):
            return shape[placement.dim] / value.shape[placement.dim]
    return None


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a call: a placement per input and per output.

    ``factor`` is the name of the factor that is sharded, ``""`` if all is replicated, ``"+"`` if partial sums
    pass through. The units of its shards are 1; ``fill_in_units`` replaces them by those of the call.
    """

    factor: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    @property
    def is_sharded(self) -> bool:
        return self.factor not in ("", "+")


REPLICATED = ""
PASS_PARTIAL = "+"


def strategies(rule: Rule, call: Call) -> tuple[Strategy, ...]:
    """All strategies that a rule allows for a call, replicated execution first."""
    num_inputs, num_outputs = len(call.inputs), len(call.outputs)
    out = [Strategy(REPLICATED, (REPLICATE,) * num_inputs, (REPLICATE,) * num_outputs)]
    try:
        bound = rule.bound(call)
    except PatternMismatch:
        return tuple(out)  # shapes that the rule does not cover run replicated
    for factor in bound.shardable():
        strategy = shard_strategy(bound, factor, rule.own)
        if strategy is not None and sums_are_floating(strategy, call):
            out.append(strategy)
    # a boolean result (dropout's mask) does not depend on the partial input
    passed = tuple(REPLICATE if t.dtype == "bool" else PARTIAL for t in call.outputs)
    for group in rule.partial_groups(call):
        if PARTIAL not in passed or not group or not is_sum(call, group):
            continue
        held = bound.additive | set(group)
        inputs = tuple(PARTIAL if i in held else REPLICATE for i in range(num_inputs))
        out.append(Strategy(PASS_PARTIAL, inputs, passed))
    return tuple(dict.fromkeys(out))


def is_sum(call: Call, group: tuple[int, ...]) -> bool:
    """Whether a call maps sums of these inputs to sums: none is boolean, and no result is rounded."""
    if any(call.inputs[i].dtype == "bool" for i in group):
        return False
    rounds = any(not t.is_floating and t.dtype != "bool" for t in call.outputs)
    return not (rounds and any(t.is_floating for t in call.inputs))


def shard_strategy(bound: Bound, factor: str, own: tuple[int, ...] = ()) -> Strategy | None:
    """The strategy that shards ``factor``, or None. Results of ``own`` stay on their ranks."""
    outputs = tuple(
        _place(dims, factor) or (REPLICATE if n in own else PARTIAL) for n, dims in enumerate(bound.outputs)
    )
    partial = any(isinstance(p, Partial) for p in outputs)
    if partial and any(isinstance(p, Shard) for p in outputs):
        # the sum of one output would be whole, while another is sharded: no operator here needs that
        return None
    inputs = tuple(
        _place(dims, factor) or (PARTIAL if partial and i in bound.additive else REPLICATE)
        for i, dims in enumerate(bound.inputs)
    )
    return Strategy(factor, inputs, outputs)


def sums_are_floating(strategy: Strategy, call: Call) -> bool:
    """Whether all partial sums are floating-point. A partial sum of booleans has no meaning; integers may be
    summed."""
    return not any(
        isinstance(p, Partial) and t.dtype == "bool" for p, t in zip(strategy.outputs, call.outputs)
    )


def _place(dims: Sequence[Dim], factor: str) -> Placement | None:
    for index, dim in enumerate(dims):
        if factor in dim:
            return Shard(index)
    return None


def find_strategy(
    rule: Rule, call: Call, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]
) -> Strategy | None:
    """The strategy that has these placements, with fitting units; None if the rule allows none."""
    bare_inputs, bare_outputs = tuple(map(bare, inputs)), tuple(map(bare, outputs))
    for strategy in strategies(rule, call):
        if strategy.inputs == bare_inputs and strategy.outputs == bare_outputs:
            if not strategy.is_sharded:
                return strategy
            if _units_agree(rule.bound(call), strategy.factor, inputs, outputs):
                return strategy
    return None


def bare(placement: Placement) -> Placement:
    return replace(placement, unit=1) if isinstance(placement, Shard) else placement


def _units_agree(
    bound: Bound, factor: str, inputs: Sequence[Placement], outputs: Sequence[Placement]
) -> bool:
    steps = set()
    for dims, placement in [*zip(bound.inputs, inputs), *zip(bound.outputs, outputs)]:
        if isinstance(placement, Shard):
            trailing = bound.trailing(dims[placement.dim])
            if placement.unit % trailing:
                return False
            steps.add(placement.unit // trailing)
    return len(steps) <= 1 and all(bound.sizes[factor] % s == 0 for s in steps)


def fill_in_units(
    rule: Rule | None,
    call: Call,
    strategy: Strategy,
    inputs: tuple[Placement, ...],
    outputs: Sequence[Placement | None],
) -> list[Placement]:
    """The placements of all results, with units; None in ``outputs`` stands for an unknown placement. Its
    unit follows from those of the inputs and the other results."""
    if rule is None or not strategy.is_sharded:
        return [explicit or bare for explicit, bare in zip(outputs, strategy.outputs)]
    bound = rule.bound(call)
    cuts = [*zip(bound.inputs, inputs), *zip(bound.outputs, outputs)]
    steps = {p.unit // bound.trailing(dims[p.dim]) for dims, p in cuts if isinstance(p, Shard)}

    def placement(dims: tuple[Dim, ...], bare: Placement) -> Placement:
        if not isinstance(bare, Shard):
            return bare
        return replace(bare, unit=max(steps, default=1) * bound.trailing(dims[bare.dim]))

    derived = map(placement, bound.outputs, strategy.outputs)
    return [explicit or p for explicit, p in zip(outputs, derived)]


def multiply_adds(rule: Rule, call: Call) -> int:
    """The multiply-adds of the whole call; 0 for an operator bound by memory."""
    if not rule.flops:
        return 0
    sizes = rule.bound(call).sizes
    flops = rule.flops(call) if callable(rule.flops) else rule.flops
    named = [term.split() for term in flops.split("+")]
    return round(sum(math.prod(_factor_size(sizes, f) for f in names) for names in named))


def _factor_size(sizes: dict[str, int], factor: str) -> float:
    if factor == "...":
        return math.prod(n for f, n in sizes.items() if f.startswith("_"))
    if factor[0].isdigit():
        return float(factor)
    return sizes.get(factor, 1)


def call_key(call: Call) -> tuple:
    """A key of the call without the names of values, which make no difference to rules."""
    plain = tuple(map(nameless, call.args)), tuple((k, nameless(v)) for k, v in call.kwargs)
    return (call.op, *plain, call.inputs, call.outputs)


def call_of(node: Node | Instruction, types: Mapping[str, ValueType] | Mapping[str, TensorType]) -> Call:
    """The call that a node or an instruction makes; ``types`` maps names to types."""

    def value(t: ValueType | TensorType) -> ValueType:
        return t if isinstance(t, ValueType) else t.value

    return Call(
        node.op,
        node.args,
        node.kwargs,
        tuple(value(types[name]) for name in node.inputs),
        tuple(map(value, node.types)),
    )
