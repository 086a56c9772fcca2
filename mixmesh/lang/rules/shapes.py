"""Rules of shapes: each function returns rule text for one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .pattern import PatternMismatch
from .rule import Arguments, Call, LocalCall


def names(count: int, prefix: str = "d") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def rank_of(call: Call, index: int = 0) -> int:
    return len(call.inputs[index].shape)


def wrap(dim: int, rank: int) -> int:
    """Converts a dim that may be negative to one that is counted from the front."""
    return dim + rank if dim < 0 else dim


def same(call: Call) -> str:
    """The rule of an elementwise operator, with broadcasting."""
    return ", ".join(["..."] * len(call.inputs)) + " -> " + ", ".join(["..."] * len(call.outputs))


def fixed_dims(call: Call, dims: Iterable[int]) -> str:
    """The rule of an operator whose inputs and outputs have one shape, and whose ``dims`` must be whole."""
    rank = rank_of(call)
    whole = {wrap(d, rank) for d in dims}
    text = " ".join(f"d{i}!" if i in whole else f"d{i}" for i in range(rank))
    return ", ".join([text] * len(call.inputs)) + " -> " + ", ".join([text] * len(call.outputs))


def along(index: int, name: str = "dim", default: int = -1) -> Callable[[Call], str]:
    """The rule of an operator that needs one dim (argument ``index``) whole."""

    def rule(call: Call) -> str:
        return fixed_dims(call, (call.arg(index, name, default),))

    return rule


def reduce_dims(index: int, *, contract: bool) -> Callable[[Call], str]:
    """A reduction over the dims of argument ``index`` (all of them if it is absent).

    With ``contract``, partial results add up (sum, mean); otherwise the dims must be whole.
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
    a, b = (wrap(d, rank) for d in (call.args[1:] or (0, 1)))
    order = names(rank)
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return " ".join(names(rank)) + " -> " + " ".join(order)


def view(call: Call) -> tuple[str, dict[str, int]]:
    """Splits and merges of dims, derived from the left by common divisors.

    Where both sides continue with a common number of elements, they share a factor. (8, 6) -> (4, 12) is
    "(a b) c -> a (b c)": it is cut in pairs of rows on the left, in rows on the right.
    """
    source, target = call.inputs[0].shape, call.outputs[0].shape
    if math.prod(source) == 0:
        raise PatternMismatch("a view of nothing")
    left, right = [list[str]() for _ in source], [list[str]() for _ in target]
    sizes: dict[str, int] = {}
    i = j = 0
    a = b = 1  # the remainders of the sizes of the current dims
    whole = False  # the two sides have no common divisor: no dim can be cut until they meet again

    def emit(size: int, *places: list[str]) -> None:
        name = f"f{len(sizes)}"
        sizes[name] = size
        for place in places:
            place.append(name + ("!" if whole else ""))

    while True:
        if a == 1 and i < len(source):
            a, i = source[i], i + 1
            continue
        if b == 1 and j < len(target):
            b, j = target[j], j + 1
            continue
        if a == b == 1:
            break
        common = math.gcd(a, b)
        if common > 1 and not whole:
            emit(common, left[i - 1], right[j - 1])
            a, b = a // common, b // common
            continue
        whole = True
        elements_a, elements_b = a, b
        emit(a, left[i - 1])
        emit(b, right[j - 1])
        while elements_a != elements_b:
            if elements_a < elements_b:
                emit(source[i], left[i])
                elements_a, i = elements_a * source[i], i + 1
            else:
                emit(target[j], right[j])
                elements_b, j = elements_b * target[j], j + 1
        a = b = 1
        whole = False

    def text(side: list[list[str]]) -> str:
        return " ".join(f"({' '.join(d)})" if len(d) > 1 else d[0] if d else "1" for d in side)

    return f"{text(left)} -> {text(right)}", sizes


def local_view(local: LocalCall) -> Arguments:
    return (local.call.args[0], local.out_shapes[0], *local.call.args[2:]), local.call.kwargs


def expand(call: Call) -> str:
    source, target = call.inputs[0].shape, call.outputs[0].shape
    offset = len(target) - len(source)
    right = names(len(target))
    left = [right[offset + i] if n == target[offset + i] else "1" for i, n in enumerate(source)]
    return " ".join(left) + " -> " + " ".join(right)


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


def pieces(dim_index: int) -> Callable[[Call], str]:
    """split, chunk: the dim that is split into several results must be whole."""

    def rule(call: Call) -> str:
        rank = rank_of(call)
        dim = wrap(call.arg(dim_index, "dim", 0), rank)
        left = " ".join("c!" if i == dim else f"d{i}" for i in range(rank))
        outs = [
            " ".join(f"p{n}!" if i == dim else f"d{i}" for i in range(rank)) for n in range(len(call.outputs))
        ]
        return f"{left} -> {', '.join(outs)}"

    return rule


def drop_dim(dim_index: int) -> Callable[[Call], str]:
    """select, unbind: the dim that is dropped must be whole."""

    def rule(call: Call) -> str:
        rank = rank_of(call)
        dim = wrap(call.arg(dim_index, "dim", 0), rank)
        left = " ".join(f"d{i}!" if i == dim else f"d{i}" for i in range(rank))
        kept = " ".join(f"d{i}" for i in range(rank) if i != dim)
        return f"{left} -> {', '.join([kept] * len(call.outputs))}"

    return rule


def resize_dim(dim_index: int, default: int = 0) -> Callable[[Call], str]:
    """slice, glu, unfold, diff: the dim (an argument) whose size changes must be whole."""

    def rule(call: Call) -> str:
        rank = rank_of(call)
        dim = wrap(call.arg(dim_index, "dim", default), rank)
        keeps = call.inputs[0].shape == call.outputs[0].shape
        left = " ".join("a!" if i == dim else f"d{i}" for i in range(rank))
        out = left.replace("a!", "b!")
        added = [f"e{i}!" for i in range(len(call.outputs[0].shape) - rank)]
        others = [left.replace("a!", f"c{n}!") for n in range(1, len(call.inputs))]
        return ", ".join([left, *others]) + " -> " + " ".join([left if keeps else out, *added])

    return rule


def slice_(call: Call) -> str:
    """slice(self, dim, start, end, step): the dim is whole, unless the slice takes all of it."""
    if call.inputs[0].shape == call.outputs[0].shape:
        return "... -> ..."
    return resize_dim(1)(call)


def pad(call: Call) -> str:
    """pad(self, [before and after the last dim, then those of the dim before it, ...]): padded or cropped
    dims are whole."""
    rank = rank_of(call)
    amounts = call.args[1]
    touched = {rank - 1 - k // 2 for k, amount in enumerate(amounts) if amount}
    left = " ".join(f"a{i}!" if i in touched else f"d{i}" for i in range(rank))
    return f"{left} -> {left.replace('a', 'b')}"


def repeat(call: Call) -> tuple[str, dict[str, int]]:
    """repeat(self, repeats): a repeated dim is (times, size), and may be cut between its repetitions."""
    source, times = call.inputs[0].shape, call.args[1]
    shape = (1,) * (len(times) - len(source)) + source
    left, right, sizes = [], [], dict[str, int]()
    for i, (n, r) in enumerate(zip(shape, times)):
        left.append(f"d{i}")
        right.append(f"d{i}" if r == 1 else f"(r{i} d{i})")
        sizes |= {f"d{i}": n, f"r{i}": r}
    return " ".join(left[len(times) - len(source) :]) + " -> " + " ".join(right), sizes


def local_repeat(local: LocalCall) -> Arguments:
    source, out = local.in_shapes[0], local.out_shapes[0]
    shape = (1,) * (len(out) - len(source)) + source
    times = tuple(o // n if n else r for n, o, r in zip(shape, out, local.call.args[1]))
    return (local.call.args[0], times), local.call.kwargs


def repeat_interleave(call: Call) -> tuple[str, dict[str, int]]:
    """repeat_interleave(self, repeats, dim): each entry is repeated in place."""
    rank, times = rank_of(call), call.args[1]
    dim = call.arg(2, "dim")
    if dim is None:
        if rank != 1:
            raise PatternMismatch("repeat_interleave that flattens")
        dim = 0
    dim = wrap(dim, rank)
    right = " ".join(f"(d{i} r)" if i == dim else f"d{i}" for i in range(rank))
    sizes = {f"d{i}": n for i, n in enumerate(call.inputs[0].shape)}
    return " ".join(names(rank)) + " -> " + right, {**sizes, "r": times}


def local_repeat_interleave(local: LocalCall) -> Arguments:
    kwargs = tuple((k, v) for k, v in local.call.kwargs if k != "output_size")
    return local.call.args[:3], kwargs


def pixel_shuffle(call: Call) -> tuple[str, dict[str, int]]:
    r = call.args[1]
    return "... (c p q) h w -> ... c (h p) (w q)", {"p": r, "q": r}


def pixel_unshuffle(call: Call) -> tuple[str, dict[str, int]]:
    r = call.args[1]
    return "... c (h p) (w q) -> ... (c p q) h w", {"p": r, "q": r}


def space_whole(call: Call) -> str:
    """Pooling, upsampling: samples and channels are free, spatial dims are whole. There may be no samples."""
    spatial = _spatial(call)
    free = " ".join(f"n{i}" for i in range(rank_of(call) - spatial))
    left = " ".join(f"h{i}!" for i in range(spatial))
    right = " ".join(f"y{i}!" for i in range(spatial))
    return f"{free} {left} -> " + ", ".join([f"{free} {right}"] * len(call.outputs))


def pool(call: Call) -> tuple[str, dict[str, int]]:
    """max_pool, avg_pool(self, kernel, stride, padding): spatial dims may be cut between windows that
    touch."""
    spatial = _spatial(call)
    rank = rank_of(call)

    def of(position: int, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = call.arg(position, name, default) or default
        value = (value,) if isinstance(value, int) else value  # edited text may have an int here
        return value * spatial if len(value) == 1 else value

    kernel = of(1, "kernel_size", ())
    stride, padding = of(2, "stride", kernel), of(3, "padding", (0,))
    dilated = "max" in call.op and of(4, "dilation", (1,)) != (1,) * spatial
    free = " ".join(f"n{i}" for i in range(rank - spatial))
    left, right, sizes = [], [], dict[str, int]()
    for i, n in enumerate(call.inputs[0].shape[rank - spatial :]):
        tiles = stride[i] == kernel[i] and padding[i] == 0 and n % kernel[i] == 0 and not dilated
        left.append(f"(y{i} k{i})" if tiles else f"h{i}!")
        right.append(f"y{i}" if tiles else f"y{i}!")
        sizes |= {f"k{i}": kernel[i]} if tiles else {}
    return f"{free} {' '.join(left)} -> {free} {' '.join(right)}", sizes


def _spatial(call: Call) -> int:
    digit = next((c for c in call.op.partition(".")[2] if c.isdigit()), "2")
    return int(digit)


def im2col(call: Call) -> tuple[str, dict[str, int]]:
    """n c h w -> n (c k) l: channels come before the positions in the kernel."""
    (a, b) = call.args[1]
    return "n c h! w! -> n (c k) l!", {"k": a * b}


def col2im(call: Call) -> tuple[str, dict[str, int]]:
    (a, b) = call.args[2]
    return "n (c k) l! -> n c h! w!", {"k": a * b}


def meshgrid(call: Call) -> str:
    """meshgrid(*vectors): every result has a dim for each vector."""
    vectors = names(len(call.inputs), "v")
    order = list(vectors)
    if dict(call.kwargs).get("indexing") == "xy" and len(order) > 1:
        order[:2] = order[1::-1]
    return ", ".join(vectors) + " -> " + ", ".join([" ".join(order)] * len(vectors))


def transformed(default: tuple[int, ...] = ()) -> Callable[[Call], str]:
    """fft_rfftn(self, sizes, dims) and similar ones: the transformed dims are whole, and their sizes
    change."""

    def rule(call: Call) -> str:
        rank = rank_of(call)
        dims = call.arg(2, "dim") or default or tuple(range(rank))
        whole = {wrap(d, rank) for d in dims}
        left = " ".join(f"a{i}!" if i in whole else f"d{i}" for i in range(rank))
        return f"{left} -> {left.replace('a', 'b')}"

    return rule


def aminmax(call: Call) -> str:
    """aminmax(self, *, dim, keepdim): like ``amax``, over one dim or all."""
    return reduce_dims(len(call.args), contract=False)(call)


def rot90(call: Call) -> str:
    """rot90(self, k, dims): a quarter turn swaps two dims and reverses one of them."""
    rank = rank_of(call)
    k, (a, b) = call.arg(1, "k", 1) % 4, (wrap(d, rank) for d in call.arg(2, "dims", (0, 1)))
    turned = {0: (), 1: (b,), 2: (a, b), 3: (a,)}[k]
    left = [f"d{i}!" if i in turned else f"d{i}" for i in range(rank)]
    right = list(left)
    if k % 2:
        right[a], right[b] = left[b], left[a]
    return f"{' '.join(left)} -> {' '.join(right)}"


def unpool(call: Call) -> str:
    """max_unpool(self, indices, size): writes every value at its index in the plane, zeros elsewhere.

    Overlapping windows may share a maximum, which is written only once: so the plane is whole.
    """
    spatial = _spatial(call)
    free = " ".join(f"n{i}" for i in range(rank_of(call) - spatial))
    left = f"{free} {' '.join(f'h{i}!' for i in range(spatial))}"
    return f"{left}, {left} -> {free} {' '.join(f'y{i}!' for i in range(spatial))}"


def renorm(call: Call) -> str:
    """renorm(self, p, dim, maxnorm): each slice along the dim is scaled independently."""
    rank = rank_of(call)
    dim = wrap(call.args[2], rank)
    return fixed_dims(call, tuple(i for i in range(rank) if i != dim))


def diag_embed(call: Call) -> str:
    """diag_embed(self, offset, dim1, dim2): the last dim becomes two."""
    rank = rank_of(call) + 1
    diagonal_dims = {wrap(call.arg(2, "dim1", -2), rank), wrap(call.arg(3, "dim2", -1), rank)}
    free = iter(names(rank - 2))
    right = [f"b{i}!" if i in diagonal_dims else next(free) for i in range(rank)]
    return " ".join([*names(rank - 2), "a!"]) + " -> " + " ".join(right)


def affine_grid(call: Call) -> str:
    """affine_grid_generator(theta, (n, c, h, w), align_corners): makes a grid for every sample."""
    return "n a! b! -> n " + " ".join(f"h{i}!" for i in range(len(call.outputs[0].shape) - 1))


def local_affine_grid(local: LocalCall) -> Arguments:
    theta, size, *rest = local.call.args
    return (theta, (local.out_shapes[0][0], *size[1:]), *rest), local.call.kwargs


def stft(call: Call) -> str:
    """stft(self, n_fft, hop_length, win_length, window): time is whole, and so are frequencies and frames."""
    batch = "n " if rank_of(call) > 1 else ""
    tail = [f"{name}!" for name in ("f", "s", "c")][: len(call.outputs[0].shape) - rank_of(call) + 1]
    return f"{batch}t!, w! -> {batch}{' '.join(tail)}"


def vector_norm(call: Call) -> str:
    """linalg_vector_norm(x, ord, dim): the sum for ord = 1 may be cut, other norms may not."""
    return reduce_dims(2, contract=call.arg(1, "ord", 2) == 1)(call)


def diagonal(call: Call) -> str:
    """diagonal(self, offset, dim1, dim2): the two dims become one at the end."""
    rank = rank_of(call)
    cut = {wrap(call.arg(2, "dim1", 0), rank), wrap(call.arg(3, "dim2", 1), rank)}
    left = " ".join(f"a{i}!" if i in cut else f"d{i}" for i in range(rank))
    return f"{left} -> " + " ".join([f"d{i}" for i in range(rank) if i not in cut] + ["z!"])


def last_whole(count: int) -> Callable[[Call], str]:
    """tril, triu: the last dims are whole, the others are free."""

    def rule(call: Call) -> str:
        rank = rank_of(call)
        return fixed_dims(call, tuple(range(rank - count, rank)))

    return rule


def scatter_slice(call: Call) -> str:
    """slice_scatter, select_scatter(self, src, dim, ...): the written dim is whole."""
    rank = rank_of(call)
    dim = wrap(call.arg(2, "dim", 0), rank)
    left = " ".join("x!" if i == dim else f"d{i}" for i in range(rank))
    selects = len(call.inputs[1].shape) < rank
    source = " ".join("y!" if i == dim else f"d{i}" for i in range(rank) if not (selects and i == dim))
    return f"{left}, {source} -> {left}"


def channels_of(call: Call) -> str:
    """prelu(x, weight): one weight for all, or one for each entry of the second dim."""
    rank = rank_of(call)
    if math.prod(call.inputs[1].shape) == 1 or rank < 2:
        return f"..., {' '.join(['1'] * rank_of(call, 1))} -> ..."
    rest = " ".join(f"h{i}" for i in range(rank - 2))
    return f"n c {rest}, c -> n c {rest}"


def grid_sampler(call: Call) -> str:
    """grid_sampler(x, grid): spatial dims of the output are free, those of the input are whole."""
    spatial = rank_of(call) - 2
    source = " ".join(f"h{i}!" for i in range(spatial))
    places = " ".join(f"y{i}" for i in range(spatial))
    return f"n c {source}, n {places} t! -> n c {places}"


def histogram(call: Call) -> str:
    """histc(x, bins, min, max): counts add up if the range is an argument."""
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    mark = "!" if low == high else ""
    return " ".join(f"d{i}{mark}" for i in range(rank_of(call))) + " -> b!"


def reads_no_value(call: Call) -> str:
    """type_as(self, other): only the dtype of ``other`` is read; it is cut like ``self`` if it has its
    shape."""
    if call.inputs[0].shape == call.inputs[1].shape:
        return "..., ... -> ..."
    return "..., " + " ".join(f"x{i}!" for i in range(rank_of(call, 1))) + " -> ..."
