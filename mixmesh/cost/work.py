"""The work in an operator: its floating point operations, the bytes that it moves, the sizes of a product."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..lang.rules import RULES, Call, PatternMismatch, multiply_adds

# operators that only return a new view of the same bytes
VIEWS = frozenset(
    f"aten.{op}"
    for op in (
        "view expand transpose.int t permute unsqueeze squeeze squeeze.dim squeeze.dims split.Tensor "
        "split_with_sizes chunk slice.Tensor select.int unbind.int detach alias"
    ).split()
)
HALF = ("f16", "bf16")
# Forward and backward passes over inputs and results, for memory-bound operators that do not read them just
# once. In the backward pass, normalise reads its gradient and its data for two sums, and moments reads both
# again and writes the gradient of the data. PyTorch's batch norm does the same in one operator. Cross entropy
# looks at one logit of a row in the forward pass.
MEMORY_BOUND_OWN = {
    "mixmesh.local_batch_norm": (1.5, 2.5), "mixmesh.moments": (1.0, 3.0), "mixmesh.normalise": (1.0, 1.0),
    "mixmesh.sum_exp": (1.0, 0.0), "mixmesh.cross_entropy": (0.0, 1.5),
}  # fmt: skip


def is_product(call: Call) -> bool:
    return call.op in RULES and bool(RULES[call.op].flops)


def call_flop(call: Call) -> int:
    """Floating point operations of the whole call (2 per multiply-add); 0 if memory-bound."""
    rule = RULES.get(call.op)
    if rule is None or not rule.flops:
        return 0
    try:
        return 2 * multiply_adds(rule, call)
    except PatternMismatch:
        return 0


def moved_bytes(call: Call) -> int:
    """Bytes read and written by the whole call."""
    return sum(t.size_bytes for t in call.inputs) + sum(t.size_bytes for t in call.outputs)


@dataclass(frozen=True)
class ProductSize:
    """A batch of products of [m, k] by [k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def least(self) -> int:
        return min(self.m, self.n, self.k)


def product_size(call: Call) -> ProductSize | None:
    """The sizes of a product of two tensors, from the factors in its rule: a factor that both have and the
    result lacks is contracted. None for other operators, and for shapes unknown to the rule."""
    rule = RULES.get(call.op)
    if rule is None or not rule.flops:
        return None
    try:
        bound = rule.bound(call)
    except PatternMismatch:
        return None
    factors = [i for i, term in enumerate(bound.inputs) if i not in bound.additive]
    if len(factors) != 2 or len(bound.outputs) != 1:
        return None
    left, right = ({f for dim in bound.inputs[i] for f in dim} for i in factors)
    out = {f for dim in bound.outputs[0] for f in dim}

    def size(names: set[str]) -> int:
        return math.prod(bound.sizes[name] for name in names)

    return ProductSize(
        size(left & right & out),
        size((left - right) & out),
        size((right - left) & out),
        size((left & right) - out),
    )
