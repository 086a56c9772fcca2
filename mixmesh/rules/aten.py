"""The table: one row per ATen operator."""

from __future__ import annotations

from . import shapes as s
from .rule import Call, LocalCall, Rule

ELEMENTWISE = Rule(s.same)
LINEAR_ELEMENTWISE = Rule(s.same, linear="first")


def conv(call: Call) -> str:
    """conv2d(x, w, bias, stride, padding, dilation, groups); any number of spatial dims."""
    spatial = len(call.inputs[0].shape) - 2
    size_in = " ".join(f"h{i}!" for i in range(spatial))
    kernel = " ".join(f"a{i}!" for i in range(spatial))
    size_out = " ".join(f"y{i}!" for i in range(spatial))
    if call.arg(6, "groups", 1) == 1:
        return f"n i {size_in}, o i {kernel}, +o -> n o {size_out}"
    return f"n ci! {size_in}, o! i! {kernel}, o! -> n o! {size_out}"


def matmul(call: Call) -> str:
    a, b = (len(t.shape) for t in call.inputs)
    left = "k" if a == 1 else "... m k"
    right = "k" if b == 1 else "... k n"
    out = "..." + (" m" if a > 1 else "") + (" n" if b > 1 else "")
    return f"{left}, {right} -> {out}" if a > 1 or b > 1 else "k, k ->"


def attention(call: Call) -> str:
    """q, k, v, mask: batch and heads are free; with grouped queries the groups are what is cut."""
    causal = call.arg(5, "is_causal", False)
    grouped = call.inputs[0].shape[-3] != call.inputs[1].shape[-3] if len(call.inputs[0].shape) > 2 else False
    query = "s!" if causal else "s"
    heads = "(h g)" if grouped else "h"
    if len(call.inputs[0].shape) != 4:
        return f"... {query} e!, ... t! e!, ... t! v!, ... {query} t! -> ... {query} v!"
    mask_rank = len(call.inputs[3].shape) if len(call.inputs) > 3 else 4
    mask = " ".join(["b", heads, query, "t!"][4 - mask_rank :])
    return f"b {heads} {query} e!, b h t! e!, b h t! v!, {mask} -> b {heads} {query} v!"


def cross_entropy(call: Call) -> str:
    """Summed or unreduced; the classes are whole, the samples free."""
    spatial = " ".join(f"x{i}" for i in range(len(call.inputs[0].shape) - 2))
    batch = "n " if len(call.inputs[0].shape) > 1 else ""
    out = f"{batch}{spatial}" if call.arg(3, "reduction", 1) == 0 else ""
    if call.inputs[1].shape == call.inputs[0].shape:  # target probabilities
        return f"{batch}c! {spatial}, {batch}c! {spatial}, c! -> {out}"
    return f"{batch}c! {spatial}, {batch}{spatial}, c! -> {out}"


def gather(call: Call) -> str:
    rank = len(call.inputs[0].shape)
    dim = s.wrap(call.arg(1, "dim"), rank)
    pairs = list(zip(call.inputs[0].shape, call.inputs[1].shape))
    free = [i != dim and a == b for i, (a, b) in enumerate(pairs)]
    left = " ".join(f"d{i}" if f else f"a{i}!" for i, f in enumerate(free))
    index = " ".join(f"d{i}" if f else f"b{i}!" for i, f in enumerate(free))
    return f"{left}, {index} -> {index}"


def index(call: Call) -> str:
    """self[indices]: indexed dims are whole, the dims of the indices and the other dims are free."""
    places = [i for i, a in enumerate(call.args[1]) if a is not None]
    rank = len(call.inputs[0].shape)
    count = max(len(t.shape) for t in call.inputs[1:])
    adjacent = places == list(range(places[0], places[-1] + 1))
    left = [f"x{i}!" if i in places else f"d{i}" for i in range(rank)]
    kept = [f"d{i}" for i in range(rank) if i not in places]
    new = [f"i{count - 1 - k}" for k in range(count)]
    at = places[0] if adjacent else 0
    right = kept[:at] + new + kept[at:]
    indices = [" ".join(new[count - len(t.shape) :]) for t in call.inputs[1:]]
    return ", ".join([" ".join(left), *indices]) + " -> " + " ".join(right)


def index_select(call: Call) -> str:
    rank = s.rank_of(call)
    dim = s.wrap(call.arg(1, "dim"), rank)
    left = " ".join(f"d{i}!" if i == dim else f"d{i}" for i in range(rank))
    return f"{left}, j -> " + " ".join("j" if i == dim else f"d{i}" for i in range(rank))


def topk(call: Call) -> str:
    left, right = s.resize_dims(call).split("->")
    return f"{left} -> {right}, {right}"


def scatter_slice(call: Call) -> str:
    """slice_scatter, select_scatter(self, src, dim, ...): the written dim is whole."""
    rank = len(call.inputs[0].shape)
    dim = s.wrap(call.arg(2, "dim", 0), rank)
    left = " ".join(f"x{i}!" if i == dim else f"d{i}" for i in range(rank))
    selects = len(call.inputs[1].shape) < rank
    source = " ".join(f"d{i}" if i != dim else "y!" for i in range(rank) if not (selects and i == dim))
    return f"{left}, {source} -> {left}"


def batched_pool(call: Call) -> str:
    """Pooling: batch and channels are free, space is whole."""
    spatial = len(call.inputs[0].shape) - 2
    left = " ".join(f"h{i}!" for i in range(spatial))
    right = " ".join(f"y{i}!" for i in range(spatial))
    return f"n c {left} -> " + ", ".join([f"n c {right}"] * len(call.outputs))


def dropout(call: Call) -> str:
    return s.same(call)


def group_norm(call: Call) -> str:
    rest = " ".join(f"h{i}!" for i in range(len(call.inputs[0].shape) - 2))
    return f"n c! {rest}, c!, c! -> n c! {rest}"


def last_whole(count: int):
    """The last dims are whole (tril, triu), the rest are free."""

    def rule(call: Call) -> str:
        rank = len(call.inputs[0].shape)
        return s.fixed_dims(call, tuple(range(rank - count, rank)))

    return rule


def local_factory_like(local: LocalCall):
    return (local.call.args[0], local.out_shapes[0], *local.call.args[2:]), local.call.kwargs


_UNARY = """
    abs exp log log1p log2 sqrt rsqrt sin cos tanh sigmoid relu gelu silu erf pow.Tensor_Scalar sign
    reciprocal elu leaky_relu hardtanh hardswish hardsigmoid softplus mish relu6 celu selu logit expm1
    floor ceil round trunc isnan isinf isfinite logical_not bitwise_not clamp clamp_min clamp_max
    square sinh cosh asin acos atan log_sigmoid nan_to_num threshold
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
    add.Scalar sub.Scalar rsub.Scalar pow.Scalar fmod.Scalar remainder.Scalar
    bitwise_and.Scalar bitwise_or.Scalar __and__.Scalar __or__.Scalar floor_divide.Scalar
    full_like zeros_like ones_like empty_like fill.Scalar
""".split()
_BINARY = """
    pow.Tensor_Tensor maximum minimum min.other max.other atan2 fmod.Tensor remainder.Tensor
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
    __and__.Tensor __or__.Tensor floor_divide div.Tensor_mode copy fill.Tensor
    clamp.Tensor where.ScalarOther where.ScalarSelf where.Scalar prelu_elementwise
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    masked_fill.Tensor kl_div
""".split()
_LINEAR_UNARY = "neg mul.Scalar div.Scalar _to_copy to.dtype detach clone alias".split()

RULES: dict[str, Rule] = {
    **{f"aten.{op}": ELEMENTWISE for op in _UNARY + _BINARY},
    **{f"aten.{op}": LINEAR_ELEMENTWISE for op in _LINEAR_UNARY},
    # products and sums
    "aten.linear": Rule("... k, n k, +n -> ... n", linear=((0,), (1,)), flops="... k n"),
    "aten.addmm": Rule("+... n, m k, k n -> m n", linear=((1,), (2,)), flops="m k n"),
    "aten.mm": Rule("m k, k n -> m n", linear="separately", flops="m k n"),
    "aten.bmm": Rule("b m k, b k n -> b m n", linear="separately", flops="b m k n"),
    "aten.baddbmm": Rule("+... n, b m k, b k n -> b m n", linear=((1,), (2,)), flops="b m k n"),
    "aten.matmul": Rule(matmul, linear="separately", flops="... m k n"),
    "aten.mv": Rule("m k, k -> m", linear="separately", flops="m k"),
    "aten.dot": Rule("k, k ->", linear="separately", flops="k"),
    "aten.conv2d": Rule(conv, linear=((0,), (1,)), flops="n i o a0 a1 y0 y1"),
    "aten.conv2d.padding": Rule(conv, linear=((0,), (1,)), flops="n i o a0 a1 y0 y1"),
    "aten.conv1d": Rule(conv, linear=((0,), (1,)), flops="n i o a0 y0"),
    "aten.conv1d.padding": Rule(conv, linear=((0,), (1,)), flops="n i o a0 y0"),
    "aten.conv3d": Rule(conv, linear=((0,), (1,)), flops="n i o a0 a1 a2 y0 y1 y2"),
    "aten.scaled_dot_product_attention": Rule(
        attention, linear=((2,),), flops="b h g s t e + b h g s t v + _0 s t e + _0 s t v"
    ),
    "aten.add.Tensor": Rule(s.same, linear="jointly"),
    "aten.sub.Tensor": Rule(s.same, linear="jointly"),
    "aten.mul.Tensor": Rule(s.same, linear="separately"),
    "aten.div.Tensor": Rule(s.same, linear="first"),
    "aten.where.self": Rule(s.same, linear=((1, 2),)),
    "aten.masked_fill.Scalar": Rule(s.same),
    "aten.addcmul": Rule(s.same),
    "aten.lerp.Scalar": Rule(s.same, linear="jointly"),
    # reductions
    "aten.sum": Rule(s.reduce_dims(99, contract=True), linear="first"),
    "aten.sum.dim_IntList": Rule(s.reduce_dims(1, contract=True), linear="first"),
    "aten.mean": Rule(s.reduce_dims(99, contract=True), linear="first"),
    "aten.mean.dim": Rule(s.reduce_dims(1, contract=True), linear="first"),
    "aten.amax": Rule(s.reduce_dims(1, contract=False)),
    "aten.amin": Rule(s.reduce_dims(1, contract=False)),
    "aten.max": Rule(s.reduce_dims(99, contract=False)),
    "aten.min": Rule(s.reduce_dims(99, contract=False)),
    "aten.any": Rule(s.reduce_dims(99, contract=False)),
    "aten.all": Rule(s.reduce_dims(99, contract=False)),
    "aten.any.dim": Rule(s.reduce_dims(1, contract=False)),
    "aten.all.dim": Rule(s.reduce_dims(1, contract=False)),
    "aten.max.dim": Rule(s.reduce_dims(1, contract=False)),
    "aten.min.dim": Rule(s.reduce_dims(1, contract=False)),
    "aten.argmax": Rule(s.reduce_dims(1, contract=False)),
    "aten.argmin": Rule(s.reduce_dims(1, contract=False)),
    "aten.logsumexp": Rule(s.reduce_dims(1, contract=False)),
    "aten.prod.dim_int": Rule(s.reduce_dims(1, contract=False)),
    "aten.var.correction": Rule(s.reduce_dims(1, contract=False)),
    "aten.std.correction": Rule(s.reduce_dims(1, contract=False)),
    "aten.linalg_vector_norm": Rule(s.reduce_dims(2, contract=False)),
    # normalisations and losses
    "aten.softmax.int": Rule(s.along(1)),
    "aten.log_softmax.int": Rule(s.along(1)),
    "aten._softmax": Rule(s.along(1)),
    "aten._log_softmax": Rule(s.along(1)),
    "aten.cumsum": Rule(s.along(1)),
    "aten.layer_norm": Rule(s.normalized),
    "aten.rms_norm": Rule(s.normalized),
    "aten.group_norm": Rule(group_norm),
    "aten.native_dropout": Rule(dropout),
    "aten.cross_entropy_loss": Rule(cross_entropy),
    "aten.nll_loss": Rule(cross_entropy),
    "aten.nll_loss_nd": Rule(cross_entropy),
    # look-ups
    "aten.embedding": Rule("v d, ... -> ... d", linear="first"),
    "aten.gather": Rule(gather, linear="first"),
    "aten.index.Tensor": Rule(index, linear="first"),
    "aten.index_select": Rule(index_select, linear="first"),
    "aten.one_hot": Rule("... -> ... c!"),
    "aten.topk": Rule(topk),
    "aten.sort": Rule(s.along(1)),
    # shapes
    "aten.view": Rule(s.view, linear="first", local=s.local_view),
    "aten.expand": Rule(s.expand, linear="first", local=s.local_view),
    "aten.permute": Rule(s.permute, linear="first"),
    "aten.transpose.int": Rule(s.transpose, linear="first"),
    "aten.t": Rule(s.transpose, linear="first"),
    "aten.unsqueeze": Rule(s.unsqueeze, linear="first"),
    "aten.squeeze.dim": Rule(s.view, linear="first"),
    "aten.squeeze.dims": Rule(s.view, linear="first"),
    "aten.squeeze": Rule(s.view, linear="first"),
    "aten.cat": Rule(s.cat, linear="jointly"),
    "aten.stack": Rule(s.stack, linear="jointly"),
    "aten.split.Tensor": Rule(s.pieces(2), linear="first"),
    "aten.split_with_sizes": Rule(s.pieces(2), linear="first"),
    "aten.chunk": Rule(s.pieces(2), linear="first"),
    "aten.unbind.int": Rule(s.drop_dim(1), linear="first"),
    "aten.select.int": Rule(s.drop_dim(1), linear="first"),
    "aten.slice.Tensor": Rule(s.resize_dims, linear="first"),
    "aten.pad": Rule(s.resize_dims),
    "aten.constant_pad_nd": Rule(s.resize_dims),
    "aten.slice_scatter": Rule(scatter_slice, linear="jointly"),
    "aten.select_scatter": Rule(scatter_slice, linear="jointly"),
    "aten.flip": Rule(lambda c: s.fixed_dims(c, c.args[1])),
    "aten.roll": Rule(lambda c: s.fixed_dims(c, c.arg(2, "dims", ()) or tuple(range(s.rank_of(c))))),
    "aten.tril": Rule(last_whole(2), linear="first"),
    "aten.triu": Rule(last_whole(2), linear="first"),
    # factories
    "aten.full": Rule(s.factory, local=s.local_size_first),
    "aten.zeros": Rule(s.factory, local=s.local_size_first),
    "aten.ones": Rule(s.factory, local=s.local_size_first),
    "aten.new_zeros": Rule(s.factory_like, local=local_factory_like),
    "aten.new_ones": Rule(s.factory_like, local=local_factory_like),
    "aten.new_full": Rule(s.factory_like, local=local_factory_like),
    "aten.new_empty": Rule(s.factory_like, local=local_factory_like),
    "aten.arange": Rule("-> d"),
    "aten.arange.start": Rule("-> d"),
    "aten.arange.start_step": Rule("-> d"),
    "aten.scalar_tensor": Rule("->"),
    # pooling
    "aten.max_pool2d": Rule(batched_pool),
    "aten.avg_pool2d": Rule(batched_pool),
    "aten.adaptive_avg_pool2d": Rule(batched_pool),
    "aten.adaptive_avg_pool1d": Rule(batched_pool),
}  # fmt: skip
