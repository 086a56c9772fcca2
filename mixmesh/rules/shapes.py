"""Rules that depend on arguments: each function returns rule text for one call."""

from __future__ import annotations

import math

from ..ir import Shard
from .pattern import PatternMismatch
from .rule import Call, LocalCall


def names(count: int, prefix: str = "d") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def rank_of(call: Call, index: int = 0) -> int:
    return len(call.inputs[index].shape)


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def same(call: Call) -> str:
    """Elementwise on dim-for-dim equal shapes, broadcasting to the right."""
    return ", ".join(["..."] * len(call.inputs)) + " -> " + ", ".join(["..."] * len(call.outputs))


def fixed_dims(call: Call, dims: tuple[int, ...]) -> str:
    """Same shape in and out, with some dims whole."""
    rank = rank_of(call)
    whole = {wrap(d, rank) for d in dims}
    text = " ".join(f"d{i}!" if i in whole else f"d{i}" for i in range(rank))
    return ", ".join([text] * len(call.inputs)) + " -> " + ", ".join([text] * len(call.outputs))


def along(index: int, name: str = "dim", default: int = -1):
    """A rule for an operator that needs one dim (argument ``index``) whole."""

    def rule(call: Call) -> str:
        return fixed_dims(call, (call.arg(index, name, default),))

    return rule


def reduce_dims(index: int, *, contract: bool, keepdim_index: int | None = None):
    """Reductions over the dims of argument ``index`` (all of them if it is absent).

    ``contract`` says that partial results add up (sum, mean); otherwise the dims must be whole.
    """

    def rule(call: Call) -> str:
        rank = rank_of(call)
        dims = call.arg(index, "dim")
        if dims is None or dims == ():
            dims = tuple(range(rank))
        reduced = {wrap(d, rank) for d in (dims if isinstance(dims, tuple) else (dims,))}
        keepdim = len(call.outputs[0].shape) == rank
        mark = "" if contract else "!"
        left = " ".join(f"d{i}{mark}" if i in reduced else f"d{i}" for i in range(rank))
        kept = [("1" if i in reduced else f"d{i}") for i in range(rank) if keepdim or i not in reduced]
        return f"{left} -> " + ", ".join([" ".join(kept)] * len(call.outputs))

    return rule


def permute(call: Call) -> str:
    rank = rank_of(call)
    order = [wrap(d, rank) for d in call.arg(1, "dims")]
    return " ".join(names(rank)) + " -> " + " ".join(f"d{i}" for i in order)


def transpose(call: Call) -> str:
    rank = rank_of(call)
    a, b = (wrap(d, rank) for d in ((call.arg(1), call.arg(2)) if len(call.args) > 2 else (0, 1)))
    order = names(rank)
    if rank:
        order[a], order[b] = order[b], order[a]
    return " ".join(names(rank)) + " -> " + " ".join(order)


def view(call: Call) -> tuple[str, dict[str, int]]:
    """Splits and merges of dims, found by matching products from the left."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    if math.prod(source) == 0:
        raise PatternMismatch("a view of nothing")
    left, right, sizes = [[] for _ in source], [[] for _ in target], {}
    i = j = count = 0
    while i < len(source) or j < len(target):
        group_i, group_j = [i] if i < len(source) else [], [j] if j < len(target) else []
        a, b = (source[i] if group_i else 1), (target[j] if group_j else 1)
        while a != b:
            if a < b:
                group_i.append(group_i[-1] + 1 if group_i else i)
                a *= source[group_i[-1]]
            else:
                group_j.append(group_j[-1] + 1 if group_j else j)
                b *= target[group_j[-1]]
        i, j = i + len(group_i), j + len(group_j)
        long_i = [k for k in group_i if source[k] != 1]
        long_j = [k for k in group_j if target[k] != 1]
        whole = "!" if len(long_i) > 1 and len(long_j) > 1 else ""
        finer, coarser = (long_j, long_i) if len(long_j) >= len(long_i) else (long_i, long_j)
        shape, fine_side, coarse_side = (target, right, left) if finer is long_j else (source, left, right)
        if whole:  # a many-to-many regrouping: nothing here keeps its order under a cut
            for k in long_i:
                left[k].append(f"f{count}!")
                sizes[f"f{count}"] = source[k]
                count += 1
            for k in long_j:
                right[k].append(f"f{count}!")
                sizes[f"f{count}"] = target[k]
                count += 1
            continue
        for k in finer:
            fine_side[k].append(f"f{count}")
            coarse_side[coarser[0]].append(f"f{count}")
            sizes[f"f{count}"] = shape[k]
            count += 1

    def text(side) -> str:
        return " ".join(f"({' '.join(d)})" if len(d) > 1 else d[0] if d else "1" for d in side)

    return f"{text(left)} -> {text(right)}", sizes


def local_view(local: LocalCall):
    return (local.call.args[0], local.out_shapes[0], *local.call.args[2:]), local.call.kwargs


def local_size_first(local: LocalCall):
    """The size is the first argument (factories)."""
    return (local.out_shapes[0], *local.call.args[1:]), local.call.kwargs


def expand(call: Call) -> str:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    offset = len(target) - len(source)
    right = names(len(target))
    left = [right[offset + i] if n == target[offset + i] else "1" for i, n in enumerate(source)]
    return " ".join(left) + " -> " + " ".join(right)


def factory(call: Call) -> str:
    """A tensor of one value: any dim may be sharded."""
    return " -> " + " ".join(names(len(call.outputs[0].shape)))


def factory_like(call: Call) -> str:
    """A new tensor whose size is an argument; the input only lends its dtype."""
    left = " ".join(f"x{i}!" for i in range(rank_of(call)))
    return f"{left} -> " + " ".join(names(len(call.outputs[0].shape)))


def unsqueeze(call: Call) -> str:
    rank = rank_of(call)
    right = names(rank)
    right.insert(wrap(call.arg(1, "dim"), rank + 1), "1")
    return " ".join(names(rank)) + " -> " + " ".join(right)


def cat(call: Call) -> str:
    rank = len(call.outputs[0].shape)
    dim = wrap(call.arg(1, "dim", 0), rank)
    terms = []
    for n in range(len(call.inputs)):
        terms.append(" ".join(f"c{n}!" if i == dim else f"d{i}" for i in range(rank)))
    return ", ".join(terms) + " -> " + " ".join("c!" if i == dim else f"d{i}" for i in range(rank))


def stack(call: Call) -> str:
    rank = rank_of(call)
    right = names(rank)
    right.insert(wrap(call.arg(1, "dim", 0), rank + 1), "c!")
    return ", ".join([" ".join(names(rank))] * len(call.inputs)) + " -> " + " ".join(right)


def pieces(dim_index: int):
    """split, chunk: a dim is cut into several results and must be whole."""

    def rule(call: Call) -> str:
        rank = rank_of(call)
        dim = wrap(call.arg(dim_index, "dim", 0), rank)
        left = " ".join("c!" if i == dim else f"d{i}" for i in range(rank))
        outs = [
            " ".join(f"p{n}!" if i == dim else f"d{i}" for i in range(rank)) for n in range(len(call.outputs))
        ]
        return f"{left} -> {', '.join(outs)}"

    return rule


def drop_dim(dim_index: int):
    """select, unbind: a dim disappears and must be whole."""

    def rule(call: Call) -> str:
        rank = rank_of(call)
        dim = wrap(call.arg(dim_index, "dim", 0), rank)
        left = " ".join(f"d{i}!" if i == dim else f"d{i}" for i in range(rank))
        kept = " ".join(f"d{i}" for i in range(rank) if i != dim)
        return f"{left} -> {', '.join([kept] * len(call.outputs))}"

    return rule


def resize_dims(call: Call) -> str:
    """Dims whose size changes must be whole (slice, pad): the rest pass."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    left = " ".join(f"d{i}" if a == b else f"a{i}!" for i, (a, b) in enumerate(zip(source, target)))
    right = " ".join(f"d{i}" if a == b else f"b{i}!" for i, (a, b) in enumerate(zip(source, target)))
    return f"{left} -> {right}"


def normalized(call: Call) -> str:
    """layer_norm(x, shape, weight, bias): the normalized dims are whole."""
    count = len(call.args[1])
    tail = " ".join(f"n{i}!" for i in range(count))
    return f"... {tail}, {tail}, {tail} -> ... {tail}"


def is_sharded_on(local: LocalCall, index: int, dim: int) -> bool:
    placement = local.in_placements[index]
    return isinstance(placement, Shard) and placement.dim == dim
