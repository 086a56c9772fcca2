"""Rules of products: matrices, convolutions, attention, einsum."""

from __future__ import annotations

import re
from collections.abc import Callable

from . import shapes as s
from .rule import Arguments, Call, LocalCall


def matmul(call: Call) -> str:
    a, b = (len(t.shape) for t in call.inputs)
    left = "k" if a == 1 else "... m k"
    right = "k" if b == 1 else "... k n"
    out = "..." + (" m" if a > 1 else "") + (" n" if b > 1 else "")
    return f"{left}, {right} -> {out}" if a > 1 or b > 1 else "k, k ->"


def cdist(call: Call) -> str:
    """cdist(a, b, p): distances between all rows; the sum for p = 1 may be cut, other norms may not."""
    m = "m" if call.arg(2, "p", 2) == 1 else "m!"
    return f"... p {m}, ... r {m} -> ... p r"


def with_addend(product: str) -> Callable[[Call], str]:
    """addmm, baddbmm, addmv: adds a term, which may be broadcast, to a product."""
    out = product.split("->")[1].split()

    def rule(call: Call) -> str:
        addend = " ".join(out[len(out) - s.rank_of(call) :])
        return f"+{addend}, {product}"

    return rule


def einsum(call: Call) -> str:
    """einsum(equation, *tensors): the equation is the rule. A letter that occurs twice in one term (a
    diagonal) must be whole."""
    equation = call.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        right = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    diagonal = {c for term in terms for c in term if c != "." and term.count(c) > 1}

    def spaced(term: str) -> str:
        return " ".join(f"{c}!" if c in diagonal else c for c in re.findall(r"\.\.\.|[A-Za-z]", term))

    return ", ".join(map(spaced, terms)) + " -> " + spaced(right)


def einsum_flops(call: Call) -> str:
    """A single loop over all letters, which is exact for a product of two tensors."""
    if len(call.inputs) < 2:
        return ""
    letters = dict.fromkeys(re.findall(r"[A-Za-z]", call.args[0].partition("->")[0]))
    return " ".join([*letters, "..."])


# --- convolutions --------------------------------------------------------------------------------------

GROUPS = 6  # the position of ``groups`` in convNd and conv_transposeNd


def convolution(transposed: bool = False) -> Callable[[Call], tuple[str, dict[str, int]]]:
    """convNd(x, weight, bias, stride, padding, dilation, groups) with any number of spatial dims.

    With groups, the channels are a compound dim, of which whole groups may be cut. A transposed convolution
    has the input channels first in its weight.
    """

    def rule(call: Call) -> tuple[str, dict[str, int]]:
        x, weight = call.inputs[0].shape, call.inputs[1].shape
        spatial = len(weight) - 2
        batch = "n " if len(x) == len(weight) else ""
        tiles = [] if transposed else tiled_dims(call, x[len(x) - spatial :], weight[2:])
        size_in = " ".join(f"(y{i} b{i})" if i in tiles else f"h{i}!" for i in range(spatial))
        tile_sizes = {f"b{i}": weight[2 + i] for i in tiles}
        kernel = " ".join(f"a{i}!" for i in range(spatial))
        size_out = " ".join(f"y{i}" if i in tiles else f"y{i}!" for i in range(spatial))
        groups = call.arg(GROUPS, "groups", 1)
        if groups == 1:
            weights = "i o" if transposed else "o i"
            return f"{batch}i {size_in}, {weights} {kernel}, +o -> {batch}o {size_out}", tile_sizes
        weights = "(g i) o" if transposed else "(g o) i"
        text = f"{batch}(g i) {size_in}, {weights} {kernel}, +(g o) -> {batch}(g o) {size_out}"
        inner = {"i": weight[0] // groups, "o": weight[1]} if transposed else {"i": weight[1]}
        return text, {"g": groups, "o": weight[0] // groups, **inner, **tile_sizes}

    return rule


def tiled_dims(call: Call, size: tuple[int, ...], kernel: tuple[int, ...]) -> list[int]:
    """The spatial dims in which the patches of a convolution neither overlap nor leave a gap.

    These may be cut between patches, as in pointwise convolutions and patch embeddings.
    """

    def of(position: int, name: str, default: int) -> tuple[int, ...]:
        value = call.arg(position, name, (default,))
        return value * len(kernel) if len(value) == 1 else value

    stride, dilation = of(3, "stride", 1), of(5, "dilation", 1)
    if isinstance(call.arg(4, "padding", (0,)), str):  # "same" adds k - 1
        padding = (0 if call.arg(4, "padding") == "valid" else 1,) * len(kernel)
    else:
        padding = of(4, "padding", 0)
    return [
        i
        for i, (n, k) in enumerate(zip(size, kernel))
        if stride[i] == k and padding[i] == 0 and n % k == 0 and (k == 1 or dilation[i] == 1)
    ]


def local_groups(local: LocalCall) -> Arguments:
    """Arguments with the number of groups that a rank holds, in proportion to its input channels."""
    args, kwargs = local.call.args, local.call.kwargs
    groups = local.call.arg(GROUPS, "groups", 1)
    if groups == 1:
        return args, kwargs
    channel = len(local.in_shapes[0]) - len(local.in_shapes[1]) + 1
    held = groups * local.in_shapes[0][channel] // local.call.inputs[0].shape[channel]
    if len(args) > GROUPS:
        return (*args[:GROUPS], held, *args[GROUPS + 1 :]), kwargs
    return args, tuple((k, held if k == "groups" else v) for k, v in kwargs)


def attention(call: Call) -> str:
    """attention(q, k, v, mask): batch and heads are free; with grouped queries, the groups are.

    Queries may be cut too, each with all keys. The implied causal mask depends on their positions, which the
    local kernel counts from the first query of the whole tensor.
    """
    query, key = call.inputs[0].shape, call.inputs[1].shape
    # a single head of keys is broadcast to all heads of queries, which may then be cut anywhere
    grouped = len(query) > 2 and key[-3] not in (1, query[-3])
    heads = "(h g)" if grouped else "h"
    if len(query) != 4:
        return "... s e!, ... t! e!, ... t! v!, ... s t! -> ... s v!"
    mask_rank = len(call.inputs[3].shape) if len(call.inputs) > 3 else 4
    mask = " ".join(["b", heads, "s", "t!"][4 - mask_rank :])
    return f"b {heads} s e!, b h t! e!, b h t! v!, {mask} -> b {heads} s v!"


def grouped_mm(call: Call) -> str:
    """grouped_mm(rows, matrices, ends): rows in consecutive groups with a matrix each. The ends of the groups
    are data, so the rows are whole."""
    return "m! k, e! k n, e! -> m! n"
