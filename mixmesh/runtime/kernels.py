"""Local kernels, for operators whose result on a shard is not that of the plain operator on the shard.

For a site, a kernel returns a function of the local inputs, or None if the plain operator gives the right
result. Ranks with an empty piece run none of them (see ``empty``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import Instruction, Program, Shard, TensorType, rank_sizes, shard_offsets
from ..lang.ir.samples import DRAWS
from ..lang.operators import Operands, cross_entropy_of_part, experts_of_part, sum_exp_of_part
from ..lang.rules import MEANS, LocalCall, mean_share
from .device_random import seeded
from .random import RandomPolicy
from .window import Window

LocalOp = Callable[..., tuple[Tensor | None, ...]]
PlainOp = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Site:
    """The place where a kernel runs: the instruction, the rank, its local call, and the plain operator
    there."""

    program: Program
    instruction: Instruction
    rank: int
    device: torch.device
    random: RandomPolicy
    local: LocalCall
    plain: Callable[[], PlainOp]
    window: Window | None = None

    def span(self, t: TensorType) -> tuple[int, int]:
        """The first element and the number of elements of this rank's piece of a sharded value. In a window
        they may be asked for only while the operator runs."""
        if self.window is not None and self.window.samples.hold(self.instruction):
            return self.window.start(t), self.window.length(t)
        sizes = rank_sizes(t, self.program.ratio(t.ratio))
        return shard_offsets(sizes)[self.rank], sizes[self.rank]


# --- random numbers ------------------------------------------------------------------------------------


class Dropout(torch.autograd.Function):
    """Inverted dropout with a given mask; the mask is kept as one byte per element."""

    @staticmethod
    def forward(ctx, x, keep, scale):
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x * keep * scale

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return grad * keep * ctx.scale, None, None


def drawing(site: Site) -> Callable[[Callable], Tensor]:
    """Draws random numbers for this site's first result: returns a function of ``draw(shape, generator)``.

    See ``random``: a replicated result draws the same on all ranks, a cut one draws its own numbers, or in
    exact mode its piece of the whole. An attribute ``drawn`` marks a result that is a part of a larger draw:
    the number of the operator, the dim that is cut, the start of the part, and the whole shape.
    """
    i, random, device = site.instruction, site.random, site.device
    drawn = i.attr("drawn") if i.attrs else None
    if drawn:
        operator, dim, start, *drawn_shape = drawn
    else:
        operator = sum(1 for other in instructions_before(site.program, i) if other.op in DRAWS)
    placement = site.local.out_placements[0]
    sharded = isinstance(placement, Shard)
    shape, full_shape = site.local.out_shapes[0], i.types[0].value.shape

    def make(draw):
        if sharded and not random.exact:
            return draw(shape, random.generator(operator, site.rank + 1, device))
        if not drawn:
            whole = draw(full_shape, random.generator(operator, 0, device))
        elif random.exact:
            whole = draw(drawn_shape, random.generator(operator, 0, device))
            whole = whole.narrow(dim, start, full_shape[dim])
        else:  # equal on all ranks that share a part of the batch, different on others
            first = site.program.participants(i.types[0])[0]
            whole = draw(full_shape, random.generator(operator, first + 1, device))
        return whole.narrow(placement.dim, *site.span(i.types[0])) if sharded else whole

    return make


def instructions_before(program: Program, i: Instruction):
    for other in program.instructions:
        if other is i:
            return
        yield other


def dropout_kernel(site: Site) -> LocalOp:
    p = float(site.instruction.args[1])
    scale = 0.0 if p == 1 else 1 / (1 - p)
    make = drawing(site)

    def draw(shape, generator):
        return torch.empty(shape, device=site.device).bernoulli_(1 - p, generator=generator).bool()

    def run(x):
        keep = make(draw)
        return (Dropout.apply(x, keep, scale), keep)[: len(site.instruction.results)]

    return run


def bernoulli_kernel(site: Site) -> LocalOp:
    """bernoulli(probabilities), drawn by uniform numbers, so that a piece of the probabilities meets the same
    piece of the numbers; bernoulli.p(like, p) draws as dropout does."""
    make = drawing(site)

    def run(x):
        if site.instruction.op == "aten.bernoulli.p":
            p = float(site.local.call.arg(1, "p", 0.5))
            draw = lambda shape, g: torch.empty(shape, device=site.device).bernoulli_(p, generator=g)  # noqa: E731
            return (make(draw).to(x.dtype),)
        uniform = make(lambda shape, g: torch.rand(shape, generator=g, device=site.device))
        return ((uniform < x).to(x.dtype),)

    return run


def fill_kernel(draw: Callable):
    """Kernel of rand, randn and the like, with a given size or the shape of another tensor."""

    def kernel(site: Site) -> LocalOp:
        make = drawing(site)

        def run(*like):
            dtype = TORCH_FLOATS[site.instruction.types[0].value.dtype]
            return (make(lambda shape, g: draw(shape, generator=g, dtype=dtype, device=site.device)),)

        return run

    return kernel


def seeded_kernel(site: Site) -> LocalOp:
    """The kernel of an operator that draws in its own way and runs whole on every rank: it draws from the
    process's generator, seeded equally on all ranks. The number of its draw is a hash of its results' names,
    which are the same in every part of a program."""
    plain, device = site.plain(), site.device
    operator = zlib.crc32(" ".join(r or "" for r in site.instruction.results).encode())

    def run(*tensors):
        seed = site.random.generator(operator, 0, torch.device("cpu")).initial_seed()
        with seeded(device, seed):
            return plain(*tensors)

    return run


# --- cut dims that are read as a whole -----------------------------------------------------------------


def mean_kernel(site: Site) -> LocalOp | None:
    """A mean over a cut dim: the local mean, scaled by the local share of the count.

    The share is applied to the mean and not the sum, which need not fit a half type.
    """
    share = mean_share(site.local)
    if share is None:
        return None
    plain = site.plain()
    return lambda *tensors: (plain(*tensors)[0] * share,)


def arange_kernel(site: Site) -> LocalOp | None:
    if not isinstance(site.local.out_placements[0], Shard):
        return None
    plain = site.plain()
    return lambda: (plain()[0].narrow(0, *site.span(site.instruction.type)),)


def squeeze_kernel(site: Site) -> LocalOp:
    """Squeezes the dims that are 1 in the whole tensor: a piece may have a single element along a larger
    dim."""
    shape = site.local.out_shapes[0]
    return lambda x: (x.reshape(shape),)


# --- masked look-ups -----------------------------------------------------------------------------------


def cut_table(site: Site, dim: int) -> Callable[[], tuple[int, int]] | None:
    """The span of a table that is cut along the dim of the lookup."""
    placement = site.local.in_placements[0]
    table = site.program.types[site.instruction.inputs[0]]
    if isinstance(placement, Shard) and placement.dim == dim:
        return lambda: site.span(table)
    return None


def localize_ids(ids: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns (ids relative to this rank's first row, clamped to its rows; mask of the ids that are its
    own)."""
    local = ids - start
    return local.clamp(0, length - 1), (local >= 0) & (local < length)


def embedding_kernel(site: Site) -> LocalOp | None:
    """Looks up in a piece of the vocabulary: ids outside of the piece give zeros, to be summed over ranks."""
    span = cut_table(site, 0)
    if span is None:
        return None
    padding_idx = site.local.call.arg(2, "padding_idx", -1)

    def run(table, ids):
        local_ids, own = localize_ids(ids, *span())
        rows = torch.nn.functional.embedding(local_ids, table)
        if padding_idx >= 0:  # the padding row is looked up but gets no gradient
            rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
        return (torch.where(own.unsqueeze(-1), rows, rows.new_zeros(())),)

    return run


def gather_kernel(site: Site) -> LocalOp | None:
    dim = site.local.call.args[1] % max(len(site.local.in_shapes[0]), 1)
    span = cut_table(site, dim)
    if span is None:
        return None

    def run(table, ids):
        local_ids, own = localize_ids(ids, *span())
        return (torch.where(own, table.gather(dim, local_ids), table.new_zeros(())),)

    return run


def index_kernel(site: Site) -> LocalOp | None:
    """self[indices] with one index, and index_select, along a cut dim."""
    call = site.local.call
    if call.op == "aten.index_select":
        dim = call.args[1] % len(site.local.in_shapes[0])
    else:
        places = [n for n, a in enumerate(call.args[1]) if a is not None]
        if len(places) > 1:
            return None
        (dim,) = places
    span = cut_table(site, dim)
    if span is None:
        return None
    size, rank = call.inputs[0].shape[dim], len(call.inputs[0].shape)

    def run(table, ids):
        local_ids, own = localize_ids(torch.where(ids < 0, ids + size, ids), *span())
        rows = table.index_select(dim, local_ids.reshape(-1))
        rows = torch.where(own.reshape(-1, *[1] * (rank - 1 - dim)), rows, rows.new_zeros(()))
        return (rows.reshape(site.local.out_shapes[0]),)

    return run


# --- cut classes ---------------------------------------------------------------------------------------


def sum_exp_kernel(site: Site) -> LocalOp | None:
    if cut_table(site, 1) is None:
        return None
    return lambda x: (sum_exp_of_part(x),)


def cross_entropy_kernel(site: Site) -> LocalOp | None:
    """The kernel that computes the addend to the loss of a piece of the classes; labels count from the first
    class of all."""
    span = cut_table(site, 1)
    if span is None:
        return None
    num_classes, options = site.local.call.inputs[0].shape[1], site.local.call.args[3:]

    def run(x, sums, target):
        return (cross_entropy_of_part(x, sums, target, *options, span()[0], num_classes),)

    return run


# --- cut queries ---------------------------------------------------------------------------------------


def attention_kernel(site: Site) -> LocalOp | None:
    """Causal attention of a part of the queries: each query attends to the keys up to its own position among
    all queries, so keys behind the last query are left out."""
    call, placement = site.local.call, site.local.in_placements[0]
    queries = site.program.types[site.instruction.inputs[0]]
    is_cut = isinstance(placement, Shard) and placement.dim == len(queries.value.shape) - 2
    if not is_cut or not call.arg(5, "is_causal", False):
        return None
    options = {name: value for name, value in call.kwargs if name in ("scale", "enable_gqa")}

    def run(query, key, value):
        first, count = site.span(queries)
        num_keys = min(first + count, key.shape[-2])
        seen = torch.ones(count, num_keys, dtype=torch.bool, device=query.device).tril(first)
        key, value = key.narrow(-2, 0, num_keys), value.narrow(-2, 0, num_keys)
        return (F.scaled_dot_product_attention(query, key, value, seen, **options),)

    return run


# --- cut experts ---------------------------------------------------------------------------------------


def experts_kernel(site: Site) -> LocalOp | None:
    """The kernel that computes the addend of a piece of the experts to every token; ids count from the first
    expert of all."""
    call = site.local.call
    first_table = 1 + len(call.args[1]) + len(call.args[2])
    if not isinstance(site.local.in_placements[first_table], Shard):
        return None
    table = site.program.types[site.instruction.inputs[first_table]]
    lengths = [len(group) for group in call.args[1:5]]
    dtypes, body = [TORCH_DTYPE[dtype.name] for dtype in call.args[5]], call.args[6]

    def run(ids, *tensors):
        rest = iter(tensors)
        groups = [[next(rest) for _ in range(length)] for length in lengths]
        operands = Operands(*groups, dtypes=dtypes)
        return (experts_of_part(ids, operands, body, site.span(table)[0], table.value.shape[0]),)

    return run


# --- complex values ------------------------------------------------------------------------------------


def writing_kernel(view: Callable[..., Tensor]) -> Callable[[Site], LocalOp | None]:
    """Writes into a view of a copy, where PyTorch's operator has no gradient: of complex values."""

    def kernel(site: Site) -> LocalOp | None:
        call = site.local.call
        if not TORCH_DTYPE[call.outputs[0].dtype].is_complex:
            return None
        place, options = call.args[2:], dict(call.kwargs)

        def run(x, source):
            out = x.clone()
            view(out, *place, **options).copy_(source)
            return (out,)

        return run

    return kernel


def complex_view_kernel(site: Site) -> LocalOp:
    """The kernel of ``view_as_complex``, which needs pairs that are neighbours in memory: a program holds no
    strides, and the model's own copies for that are left out of it."""
    return lambda x: (torch.view_as_complex(x.contiguous()),)


TORCH_FLOATS = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
}  # fmt: skip
RANDOM: dict[str, Callable[[Site], LocalOp | None]] = {
    "aten.native_dropout": dropout_kernel,
    "aten.bernoulli": bernoulli_kernel,
    "aten.bernoulli.p": bernoulli_kernel,
    "aten.rand": fill_kernel(torch.rand),
    "aten.randn": fill_kernel(torch.randn),
    "aten.rand_like": fill_kernel(torch.rand),
    "aten.randn_like": fill_kernel(torch.randn),
}
KERNELS: dict[str, Callable[[Site], LocalOp | None]] = {
    **RANDOM,
    **dict.fromkeys(MEANS, mean_kernel),
    "aten.arange": arange_kernel,
    "aten.arange.start": arange_kernel,
    "aten.arange.start_step": arange_kernel,
    "aten.squeeze": squeeze_kernel,
    "aten.squeeze.dim": squeeze_kernel,
    "aten.squeeze.dims": squeeze_kernel,
    "aten.embedding": embedding_kernel,
    "aten.gather": gather_kernel,
    "aten.index.Tensor": index_kernel,
    "aten.index_select": index_kernel,
    "mixmesh.sum_exp": sum_exp_kernel,
    "mixmesh.cross_entropy": cross_entropy_kernel,
    "mixmesh.experts": experts_kernel,
    "aten.scaled_dot_product_attention": attention_kernel,
    "aten.slice_scatter": writing_kernel(torch.ops.aten.slice.Tensor),
    "aten.select_scatter": writing_kernel(torch.ops.aten.select.int),
    "aten.view_as_complex": complex_view_kernel,
}
