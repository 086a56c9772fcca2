"""The table of rules: one row per operator of ATen, and of our own (``operators``).
``python -m tools.rule_table`` prints it with examples."""

from __future__ import annotations

from collections.abc import Callable

from . import factories as f
from . import lookups as i
from . import losses as n
from . import matrices
from . import mixtures as m
from . import products as p
from . import shapes as s
from .rule import Call, Linear, Rule
from .selected import selected, selected_flops

ELEMENTWISE = Rule(s.same)
LINEAR_ELEMENTWISE = Rule(s.same, linear="first")
SPACE_WHOLE = Rule(s.space_whole)
RESAMPLED = Rule(s.space_whole, linear="first")


ALL = 99  # stands for a missing argument: the reduction is then over all dims


def if_zero(position: int, name: str, group: tuple[int, ...] = (0,)) -> Callable[[Call], Linear]:
    """Returns ``linear`` for an operator that fills in a constant: linear in ``group`` if the constant is
    zero."""

    def linear(call: Call) -> Linear:
        return (group,) if not call.arg(position, name, 0) else ()

    return linear


def terms(call: Call) -> Linear:
    """The groups of linear inputs of a sum: two tensors are linear together. A number is not: every rank
    would add it."""
    return ((0, 1),) if len(call.inputs) == 2 else ()


def pad_linear(call: Call) -> Linear:
    constant = call.arg(2, "mode", "constant") == "constant"
    return () if constant and call.arg(3, "value") else ((0,),)


UNARY = """
    abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt sin cos tan tanh sinh cosh asin acos atan asinh
    acosh atanh sigmoid relu gelu silu erf erfc erfinv sign sgn reciprocal elu leaky_relu hardtanh
    hardswish hardsigmoid hardshrink softshrink softplus mish relu6 celu selu logit lgamma digamma floor
    ceil round round.decimals trunc frac isnan isinf isfinite logical_not bitwise_not clamp clamp_min
    clamp_max square log_sigmoid nan_to_num threshold signbit sinc isposinf isneginf
    special_expit angle polygamma special_i0
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
    add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Scalar fmod.Scalar remainder.Scalar
    bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar
    __lshift__.Scalar __rshift__.Scalar floor_divide.Scalar div.Scalar_mode
    full_like zeros_like ones_like empty_like fill.Scalar where.Scalar
""".split()
BINARY = """
    pow.Tensor_Tensor maximum minimum fmax fmin min.other max.other atan2 hypot logaddexp logaddexp2
    fmod.Tensor remainder.Tensor heaviside copysign.Tensor polar
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
    __and__.Tensor __or__.Tensor __lshift__.Tensor __rshift__.Tensor floor_divide div.Tensor_mode
    clamp.Tensor clamp_min.Tensor clamp_max.Tensor _prelu_kernel
""".split()
LINEAR_UNARY = """
    neg positive mul.Scalar div.Scalar _to_copy to.dtype detach clone alias contiguous lift_fresh_copy
    real imag _conj_physical xlogy.Tensor xlogy.Scalar_Other
""".split()
POOLS = "max_pool1d max_pool2d max_pool3d".split()
LINEAR_POOLS = "avg_pool1d avg_pool2d avg_pool3d".split()
SPATIAL = """
    max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool2d adaptive_max_pool3d
""".split()
RESAMPLERS = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d
    upsample_linear1d.vec upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d
    upsample_bicubic2d.vec upsample_trilinear3d upsample_trilinear3d.vec _upsample_bilinear2d_aa
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec
    _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
""".split()
# reductions whose dims must be whole, each with the position of the argument that names these dims
WHOLE_DIMS = {
    "amax": 1, "amin": 1, "max": ALL, "min": ALL, "any": ALL, "all": ALL, "any.dim": 1, "all.dim": 1,
    "any.dims": 1, "all.dims": 1, "max.dim": 1, "min.dim": 1, "argmax": 1, "argmin": 1, "logsumexp": 1,
    "prod": ALL, "prod.dim_int": 1, "var": ALL, "var.dim": 1, "var.correction": 1, "std": ALL,
    "std.dim": 1, "std.correction": 1, "var_mean.correction": 1, "std_mean.correction": 1,
    "norm.Scalar": ALL, "norm.ScalarOpt_dim": 2, "median": ALL, "median.dim": 1,
    "mode": 1, "kthvalue": 2, "nanmedian.dim": 1,
}  # fmt: skip
ALONG_DIM = {
    "softmax.int": 1, "log_softmax.int": 1, "_softmax": 1, "_log_softmax": 1, "_safe_softmax": 1,
    "cumprod": 1,
    "logcumsumexp": 1,
    "cummax": 1, "cummin": 1, "sort": 1, "sort.stable": 2, "argsort": 1,
    "argsort.stable": 2,
}  # fmt: skip
OF_MATRICES = """
    matrix_exp matrix_power linalg_det linalg_slogdet logdet linalg_inv linalg_cholesky linalg_qr
    linalg_eigvalsh linalg_eigh linalg_svdvals linalg_pinv.atol_rtol_tensor
    _linalg_slogdet _linalg_det linalg_inv_ex linalg_cholesky_ex _linalg_svd linalg_lu cholesky_inverse
""".split()
_CONV = Rule(p.convolution(), linear=((0,), (1,)), local=p.local_groups, flops="n g i o a0 a1 a2 y0 y1 y2")
_CONV_TRANSPOSED = Rule(
    p.convolution(True), linear=((0,), (1,)), local=p.local_groups, flops="n g i o a0 a1 a2 h0 h1 h2"
)

RULES: dict[str, Rule] = {
    **{f"aten.{op}": ELEMENTWISE for op in UNARY + BINARY},
    **{f"aten.{op}": LINEAR_ELEMENTWISE for op in LINEAR_UNARY},
    **{f"aten.{op}": Rule(s.pool) for op in POOLS},
    **{f"aten.{op}": Rule(s.pool, linear="first") for op in LINEAR_POOLS},
    **{f"aten.{op}": SPACE_WHOLE for op in SPATIAL},
    **{f"aten.{op}": RESAMPLED for op in RESAMPLERS},
    **{f"aten.{op}": Rule(s.reduce_dims(at, contract=False)) for op, at in WHOLE_DIMS.items()},
    **{f"aten.{op}": Rule(s.along(at)) for op, at in ALONG_DIM.items()},
    # products
    "aten.linear": Rule("... k, n k, +n -> ... n", linear=((0,), (1,)), flops="... k n"),
    "aten.addmm": Rule(p.with_addend("m k, k n -> m n"), linear=((1,), (2,)), flops="m k n"),
    "aten.mm": Rule("m k, k n -> m n", linear="separately", flops="m k n"),
    "aten.bmm": Rule("b m k, b k n -> b m n", linear="separately", flops="b m k n"),
    "aten.baddbmm": Rule(p.with_addend("b m k, b k n -> b m n"), linear=((1,), (2,)), flops="b m k n"),
    "aten.matmul": Rule(p.matmul, linear="separately", flops="... m k n"),
    "aten.mv": Rule("m k, k -> m", linear="separately", flops="m k"),
    "aten.addmv": Rule(p.with_addend("m k, k -> m"), linear=((1,), (2,)), flops="m k"),
    "aten.dot": Rule("k, k ->", linear="separately", flops="k"),
    "aten.vdot": Rule("k, k ->", linear="separately", flops="k"),
    "aten.cdist": Rule(p.cdist, flops="... p r m"),
    **{f"aten.{op}": Rule(matrices.mapped) for op in OF_MATRICES},
    "aten._linalg_solve_ex": Rule(matrices.solved(1)),
    "aten.linalg_solve_triangular": Rule(matrices.solved(1), linear=((1,),)),
    "aten.cholesky_solve": Rule(matrices.solved(0), linear=((0,),)),
    "aten.outer": Rule("m, n -> m n", linear="separately"),
    "aten.bilinear": Rule(
        "... i, ... j, o i j, +o -> ... o", linear=((0,), (1,), (2,)), flops="... o i j"
    ),
    "aten.einsum": Rule(p.einsum, linear="separately", flops=p.einsum_flops),
    "aten.conv1d": _CONV, "aten.conv2d": _CONV, "aten.conv3d": _CONV,
    "aten.conv1d.padding": _CONV, "aten.conv2d.padding": _CONV, "aten.conv3d.padding": _CONV,
    "aten.conv_transpose1d": _CONV_TRANSPOSED, "aten.conv_transpose2d.input": _CONV_TRANSPOSED,
    "aten.conv_transpose3d.input": _CONV_TRANSPOSED,
    "aten.scaled_dot_product_attention": Rule(
        p.attention, linear=((2,),), flops="b h g s t e + b h g s t v + _0 s t e + _0 s t v"
    ),
    "transformers.grouped_mm_fallback": Rule(p.grouped_mm, linear=((0,), (1,)), flops="m k n"),
    "mixmesh.experts": Rule(m.experts, flops=m.experts_flops),
    "mixmesh.selected": Rule(selected, flops=selected_flops),
    # sums and products of elements
    "aten.add.Tensor": Rule(s.same, linear=terms),
    "aten.sub.Tensor": Rule(s.same, linear=terms),
    "aten.mul.Tensor": Rule(s.same, linear="separately"),
    "aten.div.Tensor": Rule(s.same, linear="first"),
    "aten.true_divide.Tensor": Rule(s.same, linear="first"),
    "aten.ldexp.Tensor": Rule(s.same, linear="first"),
    "aten.complex": Rule(s.same, linear="jointly"),
    "aten.addcmul": Rule(s.same, linear=((0, 1), (0, 2))),
    "aten.addcdiv": Rule(s.same, linear=((0, 1),)),
    "aten.lerp.Scalar": Rule(s.same, linear="jointly"),
    "aten.lerp.Tensor": Rule(s.same, linear=((0, 1),)),
    "aten.where.self": Rule(s.same, linear=((1, 2),)),
    "aten.where.ScalarOther": Rule(s.same, linear=if_zero(2, "other", (1,))),
    "aten.where.ScalarSelf": Rule(s.same, linear=if_zero(1, "self", (1,))),
    "aten.masked_fill.Scalar": Rule(s.same, linear=if_zero(2, "value")),
    "aten.masked_fill.Tensor": Rule(s.same, linear=((0, 2),)),
    "aten.fill.Tensor": Rule(s.same, linear=((1,),)),
    "aten.copy": Rule(s.same, linear=((1,),)),
    "aten.type_as": Rule(s.reads_no_value, linear="first"),
    "aten.prelu": Rule(s.channels_of),
    # reductions
    "aten.sum": Rule(s.reduce_dims(ALL, contract=True), linear="first"),
    "aten.sum.dim_IntList": Rule(s.reduce_dims(1, contract=True), linear="first"),
    "aten.nansum": Rule(s.reduce_dims(1, contract=True)),
    "aten.mean": Rule(s.reduce_dims(ALL, contract=True), linear="first"),
    "aten.mean.dim": Rule(s.reduce_dims(1, contract=True), linear="first"),
    "aten.count_nonzero": Rule(s.reduce_dims(ALL, contract=True)),
    "aten.count_nonzero.dim_IntList": Rule(s.reduce_dims(1, contract=True)),
    "aten.aminmax": Rule(s.aminmax),
    "aten.linalg_vector_norm": Rule(s.vector_norm),
    "aten.histc": Rule(s.histogram),
    "aten.cumsum": Rule(s.along(1), linear="first"),
    # normalisations and losses
    "aten.layer_norm": Rule(n.normalized),
    "aten.native_layer_norm": Rule(n.normalized),
    "aten.rms_norm": Rule(n.normalized),
    "aten._fused_rms_norm": Rule(n.normalized),
    "aten.group_norm": Rule(n.group_norm, local=n.local_group_norm),
    "aten.native_group_norm": Rule(n.native_group_norm, local=n.local_native_group_norm),
    "aten.batch_norm": Rule(n.batch_norm(training=5)),
    "aten.native_batch_norm": Rule(n.batch_norm(training=5)),
    "aten._native_batch_norm_legit_functional": Rule(n.batch_norm(training=5)),
    "aten._native_batch_norm_legit_no_training": Rule(n.batch_norm(training=None)),
    "mixmesh.local_batch_norm": Rule(n.local_batch_norm, own=(1, 2)),
    "mixmesh.moments": Rule(n.moments),
    "mixmesh.normalise": Rule(n.normalise),
    "mixmesh.running_statistics": Rule("s! c, c, c -> c, c"),
    "aten.instance_norm": Rule(n.instance_norm),
    "aten._weight_norm": Rule(n.weight_norm),
    "aten._weight_norm_interface": Rule(n.weight_norm),
    "aten.cosine_similarity": Rule(n.cosine_similarity),
    "aten.pairwise_distance": Rule(n.pairwise_distance),
    "aten.cross_entropy_loss": Rule(n.cross_entropy),
    "mixmesh.sum_exp": Rule(n.sum_exp),
    "mixmesh.cross_entropy": Rule(n.cross_entropy_by_sums),
    "aten.nll_loss": Rule(n.cross_entropy, linear="first"),
    "aten.nll_loss_nd": Rule(n.cross_entropy, linear="first"),
    "aten.nll_loss_forward": Rule(n.nll_loss_forward),
    "aten.nll_loss2d_forward": Rule(n.nll_loss_forward),
    "aten.ctc_loss.Tensor": Rule(n.ctc_loss),
    "aten.mse_loss": Rule(n.elementwise_loss(2)),
    "aten.l1_loss": Rule(n.elementwise_loss(2)),
    "aten.smooth_l1_loss": Rule(n.elementwise_loss(2)),
    "aten.huber_loss": Rule(n.elementwise_loss(2)),
    "aten.soft_margin_loss": Rule(n.elementwise_loss(2)),
    "aten.kl_div": Rule(n.elementwise_loss(2)),
    "aten.binary_cross_entropy": Rule(n.elementwise_loss(3)),
    "aten.binary_cross_entropy_with_logits": Rule(n.elementwise_loss(4)),
    "aten.poisson_nll_loss": Rule(n.elementwise_loss(5)),
    "aten.hinge_embedding_loss": Rule(n.elementwise_loss(3)),
    "aten.margin_ranking_loss": Rule(n.elementwise_loss(4)),
    "aten.cosine_embedding_loss": Rule(n.row_loss(4)),
    "aten.triplet_margin_loss": Rule(n.row_loss(7)),
    "aten.multi_margin_loss": Rule(n.row_loss(5)),
    "aten.multilabel_margin_loss": Rule(n.row_loss(2)),
    # recurrent layers
    "aten.lstm.input": Rule(n.recurrent(2), flops=n.recurrent_flops),
    "aten.gru.input": Rule(n.recurrent(1), flops=n.recurrent_flops),
    "aten.rnn_tanh.input": Rule(n.recurrent(1), flops=n.recurrent_flops),
    "aten.rnn_relu.input": Rule(n.recurrent(1), flops=n.recurrent_flops),
    "aten.lstm_cell": Rule(n.recurrent_cell(2), flops="n g w0 + n g w1"),
    "aten.gru_cell": Rule(n.recurrent_cell(1), flops="n g w0 + n g w1"),
    "aten.rnn_tanh_cell": Rule(n.recurrent_cell(1), flops="n g w0 + n g w1"),
    "aten.rnn_relu_cell": Rule(n.recurrent_cell(1), flops="n g w0 + n g w1"),
    # look-ups
    "aten.embedding": Rule(i.embedding, linear="first"),
    "aten.gather": Rule(i.gather, linear="first"),
    "aten.index.Tensor": Rule(i.index, linear="first"),
    "aten.index_select": Rule(i.index_select, linear="first"),
    "aten.take": Rule(lambda c: " ".join(f"a{k}!" for k in range(s.rank_of(c))) + ", ... -> ...", "first"),
    "aten.scatter.src": Rule(i.scatter(), linear=((0, 2),)),
    "aten.scatter.value": Rule(i.scatter(), linear=if_zero(3, "value")),
    "aten.scatter_add": Rule(i.scatter(adds=True), linear=((0, 2),)),
    "aten.scatter_reduce.two": Rule(i.scatter()),
    "aten.index_put": Rule(i.index_put, linear=lambda c: ((0, len(c.inputs) - 1),)),
    "aten.index_add": Rule(i.index_add, linear=((0, 2),)),
    "aten.index_copy": Rule(i.index_copy, linear=((0, 2),)),
    "aten.index_fill.int_Scalar": Rule(i.index_fill, linear=if_zero(3, "value")),
    "aten.one_hot": Rule("... -> ... c!"),
    "aten.topk": Rule(i.topk),
    "aten.isin.Tensor_Tensor": Rule(i.isin),
    "aten.bucketize.Tensor": Rule(i.bucketize),
    "aten.searchsorted.Tensor": Rule(i.searchsorted),
    # shapes
    "aten.view": Rule(s.view, linear="first", local=s.local_view),
    "aten.reshape": Rule(s.view, linear="first", local=s.local_view),
    "aten._unsafe_view": Rule(s.view, linear="first", local=s.local_view),
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
    "aten.unsafe_split.Tensor": Rule(s.pieces(2), linear="first"),
    "aten.chunk": Rule(s.pieces(2), linear="first"),
    "aten.unbind.int": Rule(s.drop_dim(1), linear="first"),
    "aten.select.int": Rule(s.drop_dim(1), linear="first"),
    "aten.slice.Tensor": Rule(s.slice_, linear="first"),
    "aten.glu": Rule(s.resize_dim(1, -1)),
    "aten.unfold": Rule(s.resize_dim(1), linear="first"),
    "aten.diff": Rule(s.resize_dim(2, -1), linear="jointly"),
    "aten.pad": Rule(s.pad, linear=pad_linear),
    "aten.constant_pad_nd": Rule(s.pad, linear=if_zero(2, "value")),
    "aten.slice_scatter": Rule(s.scatter_slice, linear="jointly"),
    "aten.select_scatter": Rule(s.scatter_slice, linear="jointly"),
    "aten.repeat": Rule(s.repeat, linear="first", local=s.local_repeat),
    "aten.repeat_interleave.self_int": Rule(
        s.repeat_interleave, linear="first", local=s.local_repeat_interleave
    ),
    "aten.repeat_interleave.Tensor": Rule("r! -> j!"),
    "aten.flip": Rule(lambda c: s.fixed_dims(c, c.args[1]), linear="first"),
    "aten.roll": Rule(
        lambda c: s.fixed_dims(c, c.arg(2, "dims", ()) or tuple(range(s.rank_of(c)))), linear="first"
    ),
    "aten.rot90": Rule(s.rot90, linear="first"),
    "aten.linalg_cross": Rule(lambda c: s.fixed_dims(c, (dict(c.kwargs).get("dim", -1),)), "separately"),
    "aten.renorm": Rule(s.renorm),
    "aten.diag_embed": Rule(s.diag_embed, linear="first"),
    "aten.max_unpool2d": Rule(s.unpool, linear="first"),
    "aten.max_unpool3d": Rule(s.unpool, linear="first"),
    "aten.affine_grid_generator": Rule(s.affine_grid, linear="first", local=s.local_affine_grid),
    "aten.tril": Rule(s.last_whole(2), linear="first"),
    "aten.triu": Rule(s.last_whole(2), linear="first"),
    "aten.diagonal": Rule(s.diagonal, linear="first"),
    "aten.pixel_shuffle": Rule(s.pixel_shuffle, linear="first"),
    "aten.pixel_unshuffle": Rule(s.pixel_unshuffle, linear="first"),
    "aten.channel_shuffle": Rule(lambda c: s.fixed_dims(c, (1,)), linear="first"),
    "aten.im2col": Rule(s.im2col, linear="first"),
    "aten.col2im": Rule(s.col2im, linear="first"),
    "aten.grid_sampler": Rule(s.grid_sampler, linear="first"),
    "aten.grid_sampler_2d": Rule(s.grid_sampler, linear="first"),
    "aten.meshgrid": Rule(s.meshgrid, linear="jointly"),
    "aten.meshgrid.indexing": Rule(s.meshgrid, linear="jointly"),
    "aten.fft_fftn": Rule(lambda c: s.fixed_dims(c, c.arg(2, "dim") or range(s.rank_of(c))), "first"),
    "aten.fft_fft": Rule(lambda c: s.fixed_dims(c, (c.arg(2, "dim", -1),)), linear="first"),
    "aten.stft": Rule(s.stft, linear="separately"),
    "aten.fft_ifft": Rule(lambda c: s.fixed_dims(c, (c.arg(2, "dim", -1),)), linear="first"),
    "aten.fft_ifftn": Rule(lambda c: s.fixed_dims(c, c.arg(2, "dim") or range(s.rank_of(c))), "first"),
    "aten.fft_fft2": Rule(s.transformed((-2, -1)), linear="first"),
    "aten.fft_ifft2": Rule(s.transformed((-2, -1)), linear="first"),
    "aten.fft_rfft": Rule(s.resize_dim(2, -1), linear="first"),
    "aten.fft_irfft": Rule(s.resize_dim(2, -1), linear="first"),
    "aten.fft_rfft2": Rule(s.transformed((-2, -1)), linear="first"),
    "aten.fft_irfft2": Rule(s.transformed((-2, -1)), linear="first"),
    "aten.fft_rfftn": Rule(s.transformed(), linear="first"),
    "aten.fft_irfftn": Rule(s.transformed(), linear="first"),
    "aten.view_as_real": Rule("... -> ... t!", linear="first"),
    "aten.view_as_complex": Rule("... t! -> ...", linear="first"),
    # factories
    "aten.full": Rule(f.factory, local=f.local_size),
    "aten.zeros": Rule(f.factory, local=f.local_size),
    "aten.ones": Rule(f.factory, local=f.local_size),
    "aten.empty.memory_format": Rule(f.factory, local=f.local_size),
    "aten.new_zeros": Rule(f.factory_like, local=f.local_size_second),
    "aten.new_ones": Rule(f.factory_like, local=f.local_size_second),
    "aten.new_full": Rule(f.factory_like, local=f.local_size_second),
    "aten.new_empty": Rule(f.factory_like, local=f.local_size_second),
    "aten.arange": Rule("-> d"),
    "aten.arange.start": Rule("-> d"),
    "aten.arange.start_step": Rule("-> d"),
    "aten.linspace": Rule("-> d!"),
    "aten.logspace": Rule("-> d!"),
    "aten.hann_window": Rule("-> d!"),
    "aten.hann_window.periodic": Rule("-> d!"),
    "aten.hamming_window": Rule("-> d!"),
    "aten.eye": Rule("-> a! b!"),
    "aten.eye.m": Rule("-> a! b!"),
    "aten.tril_indices": Rule("-> a! b!"),
    "aten.triu_indices": Rule("-> a! b!"),
    "aten.scalar_tensor": Rule("->"),
    # random numbers: the runtime decides what a shard draws
    "aten.native_dropout": LINEAR_ELEMENTWISE,
    "aten.bernoulli": ELEMENTWISE,
    "aten.bernoulli.p": ELEMENTWISE,
    "aten.rand_like": ELEMENTWISE,
    "aten.randn_like": ELEMENTWISE,
    "aten.rand": Rule(f.factory),
    "aten.randn": Rule(f.factory),
}  # fmt: skip
