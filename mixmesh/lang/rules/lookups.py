"""Rules of look-ups, of their inverses, and of sorting: gather, index, scatter, topk."""

from __future__ import annotations

from collections.abc import Callable

from . import shapes as s
from .pattern import PatternMismatch
from .rule import Call


def embedding(call: Call) -> str:
    """embedding(weight, ids): a piece of the vocabulary gives a partial sum (the local kernel masks the other
    ids)."""
    if not call.arg(3, "scale_grad_by_freq", False):
        return "v d, ... -> ... d"
    ids = " ".join(f"x{k}!" for k in range(s.rank_of(call, 1)))  # frequencies are counted over all ids
    return f"v! d, {ids} -> {ids} d"


def gather(call: Call) -> str:
    """gather(self, dim, index): either the index or the dim that it picks from may be cut."""
    rank = s.rank_of(call)
    dim = s.wrap(call.arg(1, "dim"), rank)
    pairs = list(zip(call.inputs[0].shape, call.inputs[1].shape))
    left, index = [], []
    for i, (a, b) in enumerate(pairs):
        if i == dim:
            left.append("v")
            index.append("j")
        elif a == b:
            left.append(f"d{i}")
            index.append(f"d{i}")
        else:  # only the beginning of the dim is read
            left.append(f"a{i}!")
            index.append(f"b{i}!")
    return f"{' '.join(left)}, {' '.join(index)} -> {' '.join(index)}"


def index_select(call: Call) -> str:
    """index_select(self, dim, index)."""
    rank = s.rank_of(call)
    dim = s.wrap(call.arg(1, "dim"), rank)
    left = " ".join("v" if i == dim else f"d{i}" for i in range(rank))
    index = "j" if call.inputs[1].shape else ""
    return f"{left}, {index} -> " + " ".join("j" if i == dim else f"d{i}" for i in range(rank))


def index(call: Call) -> str:
    """self[indices]: the dims of the indices and the dims that are not indexed are free.

    A single indexed dim may be cut too, with a partial sum as the result (the local kernel masks).
    """
    right, indices, rank, places = index_parts(call, 1, first_index=1)
    dims = [("v" if len(places) == 1 else f"x{i}!") if i in places else f"d{i}" for i in range(rank)]
    return ", ".join([" ".join(dims), *indices]) + " -> " + " ".join(right)


def index_put(call: Call) -> str:
    """index_put(self, indices, values, accumulate): the inverse of ``index``."""
    right, indices, rank, places = index_parts(call, 1, first_index=1, last_index=-1)
    dims = " ".join(f"x{i}!" if i in places else f"d{i}" for i in range(rank))
    values = right[len(right) - len(call.inputs[-1].shape) :]
    if call.arg(3, "accumulate", False):
        return f"+{dims}, {', '.join(indices)}, {' '.join(values)} -> {dims}"
    mark = [f"{d}!" if d[0] == "i" else d for d in values]
    whole = [" ".join(f"{d}!" for d in term.split()) for term in indices]
    return f"{dims}, {', '.join(whole)}, {' '.join(mark)} -> {dims}"


def index_parts(
    call: Call, position: int, *, first_index: int, last_index: int | None = None
) -> tuple[list[str], list[str], int, list[int]]:
    """The dims of ``self[indices]`` and of each index, the rank of ``self``, and the indexed dims."""
    tensors = call.inputs[first_index:last_index]
    if any(t.dtype in ("bool", "u8") for t in tensors):
        raise PatternMismatch("a boolean index: the size of the result is data")
    places = [i for i, a in enumerate(call.args[position]) if a is not None]
    rank = s.rank_of(call)
    count = max(len(t.shape) for t in tensors)
    adjacent = places == list(range(places[0], places[-1] + 1))
    kept = [f"d{i}" for i in range(rank) if i not in places]
    new = [f"i{count - 1 - k}" for k in range(count)]
    at = places[0] if adjacent else 0
    right = kept[:at] + new + kept[at:]
    indices = [" ".join(new[count - len(t.shape) :]) for t in tensors]
    return right, indices, rank, places


def scatter(*, adds: bool = False) -> Callable[[Call], str]:
    """scatter, scatter_add(self, dim, index[, src]): the written dim is whole.

    Index and source of an operator that only adds may be cut too, with a partial sum as the result.
    """

    def rule(call: Call) -> str:
        rank = s.rank_of(call)
        dim = s.wrap(call.arg(1, "dim"), rank)
        shapes = [t.shape for t in call.inputs]
        free = [i != dim and len({shape[i] for shape in shapes}) == 1 for i in range(rank)]
        left = " ".join(f"d{i}" if free[i] else f"x{i}!" for i in range(rank))
        terms = [f"+{left}" if adds else left]
        for n in range(len(shapes) - 1):
            names = []
            for i in range(rank):
                own = "" if len(shapes) < 3 or shapes[1][i] == shapes[2][i] else f"s{n}"
                # along the other dims, an index writes at its own position
                mark = "" if adds and i == dim and not own else "!"
                names.append(f"d{i}" if free[i] else f"k{i}{own}{mark}")
            terms.append(" ".join(names))
        return ", ".join(terms) + f" -> {left}"

    return rule


def _written(call: Call) -> str:
    """The dims of a tensor that is written to along dim ``x``."""
    rank = s.rank_of(call)
    dim = s.wrap(call.arg(1, "dim"), rank)
    return " ".join("x!" if i == dim else f"d{i}" for i in range(rank))


def index_add(call: Call) -> str:
    """index_add(self, dim, index, source)."""
    left = _written(call)
    return f"+{left}, k, {left.replace('x!', 'k')} -> {left}"


def index_copy(call: Call) -> str:
    """index_copy(self, dim, index, source)."""
    left = _written(call)
    return f"{left}, k!, {left.replace('x!', 'k!')} -> {left}"


def index_fill(call: Call) -> str:
    """index_fill(self, dim, index, value)."""
    left = _written(call)
    return f"{left}, {'k!' if call.inputs[1].shape else ''} -> {left}"


def topk(call: Call) -> str:
    """topk(self, k, dim): the dim is whole, even where k is its size."""
    rank = s.rank_of(call)
    dim = s.wrap(call.arg(2, "dim", -1), rank) if rank else 0
    left = " ".join("a!" if i == dim else f"d{i}" for i in range(rank))
    right = left.replace("a!", "b!")
    return f"{left} -> {right}, {right}"


def isin(call: Call) -> str:
    tests = " ".join(f"t{i}!" for i in range(s.rank_of(call, 1)))
    return f"..., {tests} -> ..."


def bucketize(call: Call) -> str:
    """bucketize(values, boundaries): counts boundaries, so that counts of pieces of them add up."""
    return "..., b -> ..."


def searchsorted(call: Call) -> str:
    """searchsorted(sorted, values): one sorted row for all, or one for each row of values."""
    return "b, ... -> ..." if s.rank_of(call) == 1 else "... b, ... v -> ... v"
