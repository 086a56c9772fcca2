"""Example calls of every row: what the proofs run and what ``python -m tools.rule_table`` prints. No torch.

Dims are mostly above 3, so that three ranks get unequal shards; some are 1, so that broadcasting shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mixmesh.lang.ir import Arg, DType
from mixmesh.lang.rules import aten


@dataclass(frozen=True, slots=True)
class Spec:
    """An input tensor to be drawn: ``kind`` says how, ``grad`` whether the operator has its gradient."""

    dtype: str
    shape: tuple[int, ...]
    kind: str = "normal"
    low: int = 0
    high: int = 0
    grad: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()


def call(*args: Arg, **kwargs: Arg) -> Sample:
    return Sample(args, tuple(kwargs.items()))


def F(*shape: int) -> Spec:  # noqa: N802
    """Normal numbers."""
    return Spec("f64", shape)


def P(*shape: int) -> Spec:  # noqa: N802
    """Numbers between 0.1 and 0.9."""
    return Spec("f64", shape, "positive")


def no_grad(spec: Spec) -> Spec:
    return replace(spec, grad=False)


def I(high: int, *shape: int, low: int = 0) -> Spec:  # noqa: E743, N802
    """Integers below ``high``."""
    return Spec("i64", shape, "below", low, high)


def B(*shape: int) -> Spec:  # noqa: N802
    return Spec("bool", shape, "bool")


def C(*shape: int) -> Spec:  # noqa: N802
    return Spec("c128", shape)


def LOG(*shape: int) -> Spec:  # noqa: N802
    """Logarithms of probabilities over the last dim."""
    return Spec("f64", shape, "log")


UP = Spec("f64", (4,), "sorted")
SUM = 2  # a loss's reduction

_UNARY = (call(F(5, 4)), call(F(1, 6, 3)))
_POSITIVE = (call(P(5, 4)), call(P(7)))
_BINARY = (call(F(5, 4), F(5, 4)), call(F(5, 4), F(4)), call(F(3, 1, 4), F(5, 1)))
_INT_BINARY = (call(I(9, 5, 4), I(9, 5, 4)), call(I(9, 5, 4), I(9, 4)))
_REDUCE = (call(F(5, 4)), call(F(3, 4, 2)))
_REDUCE_DIM = (call(F(5, 4), 1), call(F(3, 4, 5), -2, True))
_REDUCE_DIMS = (call(F(5, 4), (1,)), call(F(3, 4, 5), (0, -1), True))
_SCALAR = (call(F(5, 4), 0.5), call(F(6), 2))
_INT_SCALAR = (call(I(9, 5, 4), 3),)
_POOL1 = (call(F(3, 4, 8), (2,)), call(F(4, 8), (3,), (2,), (1,)))
_POOL2 = (call(F(3, 4, 8, 6), (2, 2)), call(F(4, 8, 6), (3, 3), (2, 2), (1, 1)))
_POOL3 = (call(F(3, 4, 4, 4, 6), (2, 2, 2)),)
_LOSS = (
    call(F(5, 4), F(5, 4), SUM),
    call(F(5, 4), F(5, 4), 0),
    call(F(5, 4), F(5, 4)),
    call(F(3, 4, 5), F(3, 4, 5)),
)
_NORM = (call(F(4, 5, 6), (6,), F(6), F(6)), call(F(4, 5, 6), (5, 6), F(5, 6)), call(F(7, 6), (6,)))
_POSITIVE_DEFINITE = Spec("f64", (4, 3, 3), "definite")
_ALONG = (call(F(5, 4), -1), call(F(5, 4, 3), 1), call(F(6), 0))
_PAIR_OF_STATES = (F(1, 4, 5), F(1, 4, 5))
_LSTM_PARAMS = (F(20, 3), F(20, 5), F(20), F(20))
_GRU_PARAMS = (F(15, 3), F(15, 5), F(15), F(15))
_RNN_PARAMS = (F(5, 3), F(5, 5), F(5), F(5))
_BATCH_STATISTICS = (F(4), F(4), no_grad(F(4)), no_grad(P(4)))
_GATED = (
    "h = x0 @ t0; g, u = split.Tensor(h, 3, -1); a = silu(g); m = mul.Tensor(a, u); y = m @ t1;"
    " s = unsqueeze(s0, -1); z = mul.Tensor(y, s)"
)
_OF_ROWS = "v0 = linear(x0, w0, w1); v1 = unsqueeze(x1, 1); v2 = mul.Tensor(v0, v1)"
_OF_TOKENS = "v0 = linear(s0, w0, w1); v1 = unsqueeze(x0, -1); v2 = mul.Tensor(v0, v1)"
_OF_DIMS = "v0 = linear(x0, w0); v1 = gelu(v0); v2 = _to_copy(v1, dtype=d0)"
_BIASED = (
    "h = x0 @ t0.mT; b = t1[e]; s = add.Tensor(h, b); a = tanh(s); y = mul.Tensor(a, w0);"
    " z = _to_copy(y, dtype=d0)"
)

SAMPLES: dict[str, tuple[Sample, ...]] = {
    # products
    "aten.linear": (call(F(4, 5, 6), F(8, 6), F(8)), call(F(7, 6), F(8, 6)), call(F(6), F(8, 6), F(8))),
    "aten.addmm": (
        call(F(4), F(5, 6), F(6, 4)),
        call(F(5, 4), F(5, 6), F(6, 4), beta=0.5, alpha=2.0),
        call(F(5, 1), F(5, 6), F(6, 4)),
    ),
    "aten.mm": (call(F(5, 6), F(6, 4)),),
    "aten.bmm": (call(F(4, 5, 6), F(4, 6, 3)),),
    "aten.baddbmm": (
        call(F(4, 5, 3), F(4, 5, 6), F(4, 6, 3)),
        call(F(4, 1, 3), F(4, 5, 6), F(4, 6, 3), beta=0.0),
        call(F(1, 5, 1), F(4, 5, 6), F(4, 6, 3)),
    ),
    "aten.matmul": (
        call(F(4, 5, 6), F(6, 3)),
        call(F(4, 1, 5, 6), F(3, 6, 4)),
        call(F(6), F(6, 4)),
        call(F(3, 5, 6), F(6)),
        call(F(6), F(6)),
        call(F(6), F(4, 6, 3)),
    ),
    "aten.mv": (call(F(5, 6), F(6)),),
    "aten.addmv": (call(F(5), F(5, 6), F(6)), call(F(1), F(5, 6), F(6))),
    "aten.dot": (call(F(6), F(6)),),
    "aten.vdot": (call(F(6), F(6)),),
    "aten.outer": (call(F(5), F(4)),),
    "aten.cdist": (call(F(5, 3), F(4, 3)), call(F(3, 5, 4), F(5, 4), 1.0), call(F(3, 5, 4), F(3, 1, 4))),
    "aten.matrix_exp": (call(F(4, 3, 3)), call(F(3, 3))),
    "aten.matrix_power": (call(F(4, 3, 3), 3),),
    "aten.linalg_det": (call(F(4, 3, 3)),),
    "aten.linalg_slogdet": (call(F(4, 3, 3)),),
    "aten.logdet": (call(_POSITIVE_DEFINITE),),
    "aten.linalg_inv": (call(_POSITIVE_DEFINITE),),
    "aten.linalg_cholesky": (call(_POSITIVE_DEFINITE),),
    "aten.linalg_qr": (call(F(4, 5, 3)),),
    "aten.linalg_eigvalsh": (call(F(4, 3, 3)),),
    "aten.linalg_eigh": (call(no_grad(F(4, 3, 3))),),
    "aten.linalg_svdvals": (call(F(4, 5, 3)),),
    "aten.linalg_pinv.atol_rtol_tensor": (call(F(4, 3, 3)),),
    "aten._linalg_slogdet": (call(F(4, 3, 3)), call(F(3, 3))),
    "aten._linalg_det": (call(F(4, 3, 3)),),
    "aten.linalg_inv_ex": (call(_POSITIVE_DEFINITE),),
    "aten.linalg_cholesky_ex": (call(_POSITIVE_DEFINITE),),
    "aten._linalg_svd": (call(no_grad(F(4, 5, 3))),),
    "aten.linalg_lu": (call(F(4, 3, 3)),),
    "aten.cholesky_inverse": (call(_POSITIVE_DEFINITE),),
    "aten._linalg_solve_ex": (
        call(F(4, 3, 3), F(4, 3, 2)),
        call(F(4, 3, 3), F(4, 3)),
        call(F(3, 3), F(3)),
        call(F(3, 3), F(4, 3, 2)),
    ),
    "aten.linalg_solve_triangular": (
        call(F(4, 3, 3), F(4, 3, 2), upper=False),
        call(F(3, 3), F(4, 3, 2), upper=True),
    ),
    "aten.cholesky_solve": (call(F(4, 3, 2), F(4, 3, 3)), call(F(4, 3, 2), F(3, 3))),
    "aten.bilinear": (call(F(5, 3), F(5, 4), F(6, 3, 4), F(6)), call(F(2, 5, 3), F(2, 5, 4), F(6, 3, 4))),
    "aten.einsum": (
        call("bik,bkj->bij", (F(4, 5, 6), F(4, 6, 3))),
        call("ibh,hnd->ibnd", (F(5, 3, 4), F(4, 3, 5))),
        call("...k, nk -> n...", (F(4, 5, 6), F(3, 6))),
        call("ij,jk", (F(4, 5), F(5, 3))),
        call("ii->i", (F(5, 5),)),
        call("ab,bc,cd->ad", (F(4, 5), F(5, 3), F(3, 4))),
    ),
    "aten.conv1d": (
        call(F(4, 6, 9), F(8, 6, 3), F(8)),
        call(F(6, 9), F(8, 6, 3)),
        call(F(4, 6, 9), F(6, 1, 3), F(6), (1,), (1,), (1,), 6),
        call(F(4, 6, 9), F(8, 6, 9), F(8), (9,)),
    ),
    "aten.conv2d": (
        call(F(4, 6, 7, 6), F(8, 6, 3, 3), F(8), (2, 2), (1, 1)),
        call(F(4, 6, 7, 6), F(8, 6, 1, 1)),
        call(F(4, 6, 7, 6), F(8, 6, 3, 3), None, (1, 1), (1, 1), (2, 2)),
        call(F(2, 3, 8, 12), F(5, 3, 2, 4), F(5), (2, 4)),
        call(F(4, 6, 5, 5), F(6, 1, 3, 3), F(6), (1, 1), (1, 1), (1, 1), 6),
        call(F(4, 6, 5, 5), F(12, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 6),
        call(F(4, 8, 5, 5), F(12, 2, 3, 3), F(12), (1, 1), (1, 1), (1, 1), 4),
        call(F(6, 5, 5), F(8, 6, 3, 3), F(8)),
        call(F(8, 5, 5), F(12, 2, 3, 3), F(12), groups=4),
        call(F(2, 3, 8, 12), F(5, 3, 8, 4), F(5), (8, 4)),
    ),
    "aten.conv3d": (
        call(F(4, 3, 4, 5, 4), F(5, 3, 2, 2, 2), F(5)),
        call(F(4, 3, 4, 6, 4), F(5, 3, 4, 2, 4), F(5), (4, 2, 4)),
    ),
    "aten.conv1d.padding": (call(F(4, 6, 9), F(8, 6, 3), F(8), (1,), "same"),),
    "aten.conv2d.padding": (
        call(F(4, 6, 7, 6), F(8, 6, 3, 3), F(8), (1, 1), "same"),
        call(F(4, 6, 7, 6), F(8, 3, 3, 3), F(8), (1, 1), "valid", (1, 1), 2),
    ),
    "aten.conv3d.padding": (call(F(4, 3, 4, 5, 4), F(5, 3, 2, 2, 2), F(5), (1, 1, 1), "valid"),),
    "aten.conv_transpose1d": (call(F(4, 6, 5), F(6, 5, 3), F(5), (2,)),),
    "aten.conv_transpose2d.input": (
        call(F(4, 6, 5, 4), F(6, 5, 3, 3), F(5), (2, 2)),
        call(F(4, 8, 5, 4), F(8, 3, 3, 3), F(12), (2, 2), (1, 1), (1, 1), 4),
    ),
    "aten.conv_transpose3d.input": (call(F(4, 3, 2, 3, 2), F(3, 5, 2, 2, 2)),),
    "aten.scaled_dot_product_attention": (
        call(F(3, 4, 5, 6), F(3, 4, 7, 6), F(3, 4, 7, 6)),
        call(F(3, 4, 5, 6), F(3, 4, 5, 6), F(3, 4, 5, 6), None, 0.0, True),
        call(F(3, 8, 5, 6), F(3, 4, 5, 6), F(3, 4, 5, 6), None, 0.0, True, enable_gqa=True),
        call(F(2, 4, 7, 6), F(2, 4, 4, 6), F(2, 4, 4, 6), None, 0.0, True, scale=0.3),
        call(F(3, 5, 6), F(3, 9, 6), F(3, 9, 6), None, 0.0, True),
        call(F(3, 4, 5, 6), F(3, 4, 7, 6), F(3, 4, 7, 6), F(5, 7)),
        call(F(3, 8, 5, 6), F(3, 4, 7, 6), F(3, 4, 7, 6), F(3, 8, 5, 7), enable_gqa=True),
        call(F(3, 4, 5, 6), F(3, 4, 7, 6), F(3, 4, 7, 6), F(3, 1, 5, 7), scale=0.3),
        call(F(3, 4, 5, 6), F(3, 4, 7, 6), F(3, 4, 7, 6), F(4, 1, 7)),
        call(F(3, 4, 5, 6), F(3, 1, 7, 6), F(3, 4, 7, 6)),
        call(F(3, 5, 6), F(3, 7, 6), F(3, 7, 6)),
        call(F(3, 5, 6), F(3, 7, 6), F(3, 7, 6), F(5, 7)),
        call(F(3, 4, 5, 6), F(3, 1, 5, 6), F(3, 1, 5, 6), enable_gqa=True),
    ),
    "mixmesh.experts": (
        call(I(5, 14), (F(7, 4),), (F(14),), (F(5, 4, 6), F(5, 3, 4)), (), (), _GATED, 0),
        call(I(4, 5), (F(5, 3),), (), (F(4, 3, 3), F(4, 3)), (F(3),), (DType("f64"),), _BIASED, 0),
    ),
    "mixmesh.selected": (
        call(B(7), (F(7, 4), F(7)), (), 0, (F(6, 4), F(6)), (), _OF_ROWS, 0.5, 0),
        call(B(2, 7), (F(2, 7),), (F(7, 4),), 1, (F(6, 4), F(6)), (), _OF_TOKENS, 0.5, 0),
        call(B(5, 3), (F(5, 3, 4),), (), 0, (F(4, 4),), (DType("f64"),), _OF_DIMS, 0.5, 0),
    ),
    "transformers.grouped_mm_fallback": (call(F(6, 4), F(3, 4, 5), Spec("i32", (3,), "ends", 0, 6)),),
    # sums and products of elements
    "aten.addcmul": (call(F(5, 4), F(5, 4), F(5, 4), value=0.5), call(F(5, 4), F(4), F(5, 1))),
    "aten.addcdiv": (call(F(5, 4), F(5, 4), P(5, 4)),),
    "aten.lerp.Scalar": (call(F(5, 4), F(5, 4), 0.3),),
    "aten.lerp.Tensor": (call(F(5, 4), F(5, 4), P(5, 4)),),
    "aten.where.self": (call(B(5, 4), F(5, 4), F(5, 4)), call(B(5, 1), F(4), F())),
    "aten.where.ScalarOther": (call(B(5, 4), F(5, 4), 0.0), call(B(5, 4), F(5, 4), -1.0)),
    "aten.where.ScalarSelf": (call(B(5, 4), 0.0, F(5, 4)), call(B(5, 4), 2.0, F(5, 4))),
    "aten.where.Scalar": (call(B(5, 4), 1.0, 0.0),),
    "aten.masked_fill.Scalar": (call(F(5, 4), B(5, 4), -1.0), call(F(3, 5, 4), B(5, 1), 0)),
    "aten.masked_fill.Tensor": (call(F(5, 4), B(5, 4), F()),),
    "aten.copy": (call(no_grad(F(5, 4)), no_grad(F(5, 4))), call(no_grad(F(5, 4)), no_grad(F(4)))),
    "aten.type_as": (call(F(5, 4), F(5, 4)), call(F(5, 4), F(3))),
    "aten.prelu": (call(F(5, 4, 3), F(4)), call(F(5, 4), F(1))),
    "aten._prelu_kernel": (call(F(5, 4), F(5, 4)),),
    "aten.clamp.Tensor": (call(F(5, 4), F(5, 4), P(5, 4)), call(F(5, 4), F(4))),
    "aten.fill.Tensor": (call(F(5, 4), F()),),
    "aten.fill.Scalar": (call(F(5, 4), 2.0),),
    "aten.full_like": (call(F(5, 4), 2.0),),
    "aten._to_copy": (call(F(5, 4), dtype=DType("f64")), call(I(9, 5), dtype=DType("f64"))),
    "aten.to.dtype": (call(F(5, 4), DType("f64")), call(I(9, 5), DType("f64"))),
    "aten.div.Tensor": (call(F(5, 4), P(5, 4)), call(F(5, 4), P(4)), call(F(4), P(3, 4)), call(F(5, 4), 0.3)),
    "aten.true_divide.Tensor": (call(F(5, 4), P(5, 4)),),
    "aten.div.Tensor_mode": (call(F(5, 4), P(5, 4), rounding_mode="floor"),),
    "aten.div.Scalar_mode": (call(F(5, 4), 0.3, rounding_mode="trunc"),),
    "aten.pow.Tensor_Tensor": (call(P(5, 4), F(5, 4)), call(P(5, 4), F(4))),
    "aten.pow.Tensor_Scalar": (call(F(5, 4), 2), call(F(5, 4), 3)),
    "aten.pow.Scalar": (call(2.0, F(5, 4)),),
    "aten.xlogy.Tensor": (call(F(5, 4), P(5, 4)),),
    "aten.xlogy.Scalar_Other": (call(F(5, 4), 0.5),),
    "aten.threshold": (call(F(5, 4), 0.1, 2.0),),
    "aten.clamp": (call(F(5, 4), -0.5, 0.5), call(F(5, 4), None, 0.5)),
    "aten.round.decimals": (call(F(5, 4), decimals=1),),
    "aten.leaky_relu": (call(F(5, 4), 0.2),),
    "aten.ldexp.Tensor": (call(F(5, 4), F(5, 4)), call(F(5, 4), F(4))),
    "aten.polygamma": (call(1, P(5, 4)),),
    "aten.complex": (call(F(5, 4), F(5, 4)), call(F(5, 4), F(4))),
    "aten.real": (call(C(5, 4)),),
    "aten.imag": (call(C(5, 4)),),
    "aten._conj_physical": (call(C(5, 4)),),
    # reductions
    "aten.sum": (*_REDUCE, call(I(9, 5, 4)), call(B(5, 4))),
    "aten.sum.dim_IntList": (
        *_REDUCE_DIMS,
        call(F(3, 4, 5), (-2,)),
        call(F(3, 1, 5), (1,)),
        call(F(3, 4), ()),
        call(F(3, 4), None),
        call(F(3, 4), (0,), False, dtype=DType("f64")),
    ),
    "aten.mean": (*_REDUCE, call(F())),
    "aten.mean.dim": (
        *_REDUCE_DIMS,
        call(F(3, 4, 5), (-2,)),
        call(F(3, 4), ()),
        call(F(4, 3, 2, 3), (-1, -2)),
    ),
    "aten.count_nonzero": (call(B(5, 4)),),
    "aten.count_nonzero.dim_IntList": (call(B(5, 4), (1,)),),
    "aten.histc": (call(F(7), 4, -1, 1), call(F(7), 4)),
    "aten.nansum": (call(F(5, 4)), call(F(3, 4, 5), (-2,), True)),
    "aten.aminmax": (call(F(5, 4), dim=1), call(F(3, 4, 5), dim=0, keepdim=True), call(F(5, 4))),
    "aten.prod.dim_int": _REDUCE_DIM,
    "aten.argmax": (*_REDUCE_DIM, call(F(5, 4))),
    "aten.argmin": (*_REDUCE_DIM, call(F(5, 4))),
    "aten.var.correction": (
        call(F(5, 4), (1,)),
        call(F(5, 4), (0,), correction=0, keepdim=True),
        call(F(5, 4), None),
    ),
    "aten.var.dim": (call(F(5, 4), (1,), False, True),),
    "aten.std.dim": (call(F(5, 4), (1,), False, True),),
    "aten.std.correction": (call(F(5, 4), (1,)), call(F(3, 4, 5), (-1,), correction=0)),
    "aten.var_mean.correction": (call(F(5, 4), (1,), correction=0), call(F(5, 4), (0,), keepdim=True)),
    "aten.std_mean.correction": (call(F(5, 4), (1,), correction=0),),
    "aten.linalg_vector_norm": (
        call(F(5, 4)),
        call(F(5, 4), 2.0),
        call(F(5, 4), 2.0, (-1,), True),
        call(F(5, 4, 3), 1, (0, 1)),
    ),
    "aten.norm.Scalar": (call(F(5, 4), 2),),
    "aten.norm.ScalarOpt_dim": (call(F(5, 4), 2, (1,), True),),
    "aten.kthvalue": (call(F(5, 4), 2, 1), call(F(5, 4), 1, 0, True)),
    "aten.amax": (*_REDUCE_DIMS, call(F(5, 4), ())),
    "aten.amin": _REDUCE_DIMS,
    "aten.logsumexp": _REDUCE_DIMS,
    # normalisations and losses
    "aten.layer_norm": (*_NORM, call(F(4, 6), (6,), None, F(6))),
    "aten.native_layer_norm": tuple(call(*c.args, *[None] * (4 - len(c.args)), 1e-5) for c in _NORM),
    "aten.rms_norm": (call(F(4, 5, 6), (6,), F(6), 1e-6), call(F(4, 5, 6), (5, 6))),
    "aten._fused_rms_norm": (call(F(4, 5, 6), (6,), F(6), 1e-6),),
    "aten.group_norm": (
        call(F(5, 8, 3), 4, F(8), F(8)),
        call(F(5, 4, 3, 2), 1, F(4), F(4)),
        call(F(5, 6, 3), 6),
        call(F(3, 8, 3), 2),
    ),
    "aten.native_group_norm": (
        call(F(5, 8, 3), F(8), F(8), 5, 8, 3, 4, 1e-5),
        call(F(5, 6, 4), None, None, 5, 6, 4, 3, 1e-5),
    ),
    "aten.batch_norm": (
        call(F(5, 4, 3), *_BATCH_STATISTICS, False, 0.1, 1e-5, False),
        call(F(5, 4, 3), F(4), F(4), None, None, True, 0.1, 1e-5, False),
        call(F(5, 4), None, None, no_grad(F(4)), no_grad(P(4)), False, 0.1, 1e-5, False),
    ),
    "aten.native_batch_norm": (call(F(5, 4, 3), F(4), F(4), None, None, True, 0.1, 1e-5),),
    "aten._native_batch_norm_legit_functional": (
        call(F(5, 4, 3), *_BATCH_STATISTICS, True, 0.1, 1e-5),
        call(F(5, 4, 3, 2), *_BATCH_STATISTICS, True, 0.1, 1e-5),
    ),
    "aten._native_batch_norm_legit_no_training": (call(F(5, 4, 3), *_BATCH_STATISTICS, 0.1, 1e-5),),
    "mixmesh.local_batch_norm": (
        call(F(5, 4, 3), F(4), F(4), no_grad(F(4)), no_grad(P(4)), 0.1, 1e-5),
        call(F(7, 4), None, None, None, None, 0.1, 1e-5),
    ),
    "mixmesh.moments": (call(F(5, 4, 3)), call(F(7, 4)), call(F(3, 4, 5, 2))),
    "mixmesh.normalise": (
        call(F(5, 4, 3), P(2, 4), F(4), F(4), 15, 1e-5),
        call(F(7, 4), P(2, 4), None, None, 7, 1e-5),
        call(F(3, 4, 5, 2), P(2, 4), F(4), None, 30, 1e-5),
    ),
    "mixmesh.running_statistics": (call(no_grad(P(2, 4)), no_grad(F(4)), no_grad(P(4)), 15, 0.1),),
    "aten.instance_norm": (
        call(F(5, 4, 3), F(4), F(4), None, None, True, 0.1, 1e-5, False),
        call(F(5, 4, 3, 3), None, None, None, None, True, 0.1, 1e-5, False),
        call(F(5, 4, 3), F(4), F(4), no_grad(F(4)), no_grad(P(4)), False, 0.1, 1e-5, False),
    ),
    "aten._weight_norm": (call(F(5, 4, 3), F(5, 1, 1)), call(F(5, 4, 3), F(1, 1, 3), 2)),
    "aten._weight_norm_interface": (call(F(5, 4, 3), F(5, 1, 1)), call(F(5, 4, 3), F(1, 1, 3), 2)),
    "aten.cosine_similarity": (call(F(5, 4), F(5, 4)), call(F(5, 1, 4), F(3, 4), -1)),
    "aten.pairwise_distance": (
        call(F(5, 4), F(5, 4)),
        call(F(3, 5, 4), F(5, 4), 1.0, 1e-6, True),
        call(F(6), F(6)),
    ),
    "aten.cross_entropy_loss": (
        call(F(7, 5), I(5, 7), None, SUM),
        call(F(7, 5), I(5, 7), no_grad(P(5)), SUM, -100, 0.1),
        call(F(4, 5, 3), I(5, 4, 3), None, 0),
        call(F(7, 5), P(7, 5), None, SUM),
        call(F(7, 5), I(5, 7)),
        call(F(5), I(5), None, SUM),
        call(F(4, 5, 3), P(4, 5, 3), None, 0, -100, 0.1),
        call(F(7, 5), I(5, 7), None, SUM, 2),
    ),
    "mixmesh.sum_exp": (call(F(5, 7)), call(F(4, 7, 3)), call(F(3, 5, 4, 2))),
    "mixmesh.cross_entropy": (
        call(F(5, 7), no_grad(P(5)), I(7, 5), SUM, -100, 0.0),
        call(F(5, 7), no_grad(P(5)), I(7, 5), 0, 2, 0.0),
        call(F(4, 7, 3), no_grad(P(4, 3)), I(7, 4, 3), SUM, 2, 0.1),
        call(F(4, 7, 3), no_grad(P(4, 3)), I(7, 4, 3), 0, -100, 0.1),
    ),
    "aten.nll_loss": (call(LOG(7, 5), I(5, 7), None, SUM), call(LOG(7, 5), I(5, 7), no_grad(P(5)), 0)),
    "aten.nll_loss_nd": (
        call(LOG(7, 5), I(5, 7), None, SUM),
        call(F(4, 5, 3), I(5, 4, 3), no_grad(P(5)), SUM, 2),
        call(F(7, 5), I(5, 7)),
    ),
    "aten.nll_loss_forward": (
        call(LOG(7, 5), I(5, 7), None, SUM, -100),
        call(LOG(7, 5), I(5, 7), no_grad(P(5)), SUM, 1),
        call(LOG(7, 5), I(5, 7), None, 1, -100),
    ),
    "aten.nll_loss2d_forward": (call(F(4, 5, 3, 2), I(5, 4, 3, 2), None, SUM, 2),),
    "aten.ctc_loss.Tensor": (
        call(LOG(6, 4, 5), I(5, 4, 2, low=1), I(7, 4, low=6), I(3, 4, low=1), 0, SUM),
        call(LOG(6, 4, 5), I(5, 4, 2, low=1), I(7, 4, low=6), I(3, 4, low=1), 0, 0),
    ),
    "aten.kl_div": (
        call(LOG(5, 4), P(5, 4), SUM),
        call(LOG(5, 4), LOG(5, 4), 0, log_target=True),
        call(LOG(5, 4), P(5, 4)),
    ),
    "aten.binary_cross_entropy": (
        call(P(5, 4), P(5, 4), None, SUM),
        call(P(5, 4), P(5, 4), no_grad(P(4)), 0),
        call(P(5, 4), P(5, 4)),
    ),
    "aten.binary_cross_entropy_with_logits": (
        call(F(5, 4), P(5, 4), None, None, SUM),
        call(F(5, 4), P(5, 4), no_grad(P(5, 4)), no_grad(P(4)), 0),
        call(F(5, 4), P(5, 4), None, no_grad(P(4))),
    ),
    "aten.poisson_nll_loss": tuple(
        call(F(5, 4), no_grad(P(5, 4)), True, False, 1e-8, reduction) for reduction in (SUM, 0, 1)
    ),
    "aten.hinge_embedding_loss": tuple(
        call(F(5, 4), no_grad(Spec("f64", (5, 4), "signs")), 1.0, reduction) for reduction in (SUM, 0, 1)
    ),
    "aten.margin_ranking_loss": tuple(
        call(F(7), F(7), no_grad(Spec("f64", (7,), "signs")), 0.1, reduction) for reduction in (SUM, 0, 1)
    ),
    "aten.cosine_embedding_loss": tuple(
        call(F(5, 4), F(5, 4), no_grad(Spec("f64", (5,), "signs")), 0.1, reduction)
        for reduction in (SUM, 0, 1)
    ),
    "aten.triplet_margin_loss": tuple(
        call(F(5, 4), F(5, 4), F(5, 4), 1.0, 2.0, 1e-6, False, reduction) for reduction in (SUM, 0, 1)
    ),
    "aten.multi_margin_loss": (
        *(call(F(5, 4), I(4, 5), 1, 1.0, None, reduction) for reduction in (SUM, 0, 1)),
        call(F(5, 5), I(5, 5), 1, 1.0, no_grad(P(5)), SUM),
    ),
    "aten.multilabel_margin_loss": tuple(
        call(F(5, 4), I(4, 5, 4, low=-1), reduction) for reduction in (SUM, 0, 1)
    ),
    # recurrent layers
    "aten.lstm.input": (
        call(F(6, 4, 3), _PAIR_OF_STATES, _LSTM_PARAMS, True, 1, 0.0, True, False, False),
        call(F(4, 6, 3), _PAIR_OF_STATES, _LSTM_PARAMS, True, 1, 0.0, True, False, True),
    ),
    "aten.gru.input": (call(F(6, 4, 3), F(1, 4, 5), _GRU_PARAMS, True, 1, 0.0, True, False, False),),
    "aten.rnn_tanh.input": (call(F(6, 4, 3), F(1, 4, 5), _RNN_PARAMS, True, 1, 0.0, True, False, False),),
    "aten.rnn_relu.input": (call(F(4, 6, 3), F(1, 4, 5), _RNN_PARAMS, True, 1, 0.0, True, False, True),),
    "aten.lstm_cell": (
        call(F(6, 3), (F(6, 5), F(6, 5)), *_LSTM_PARAMS),
        call(F(6, 3), (F(6, 5), F(6, 5)), *_LSTM_PARAMS[:2]),
    ),
    "aten.gru_cell": (call(F(6, 3), F(6, 5), *_GRU_PARAMS), call(F(6, 3), F(6, 5), *_GRU_PARAMS[:2])),
    "aten.rnn_tanh_cell": (call(F(6, 3), F(6, 5), *_RNN_PARAMS),),
    "aten.rnn_relu_cell": (call(F(6, 3), F(6, 5), *_RNN_PARAMS[:2]),),
    # look-ups
    "aten.embedding": (
        call(F(7, 4), I(7, 5, 3)),
        call(F(7, 4), I(7, 5, 3), 0),
        call(F(7, 4), I(7, 9), 5),
        call(F(7, 4), I(7)),
        call(F(7, 4), I(7, 9), -1, True),
    ),
    "aten.gather": (
        call(F(5, 6, 4), 1, I(6, 5, 3, 4)),
        call(F(5, 6), -1, I(6, 5, 1)),
        call(F(5, 6), 0, I(5, 4, 3)),
        call(F(6), 0, I(6, 4)),
    ),
    "aten.index.Tensor": (
        call(F(5, 4, 3), (I(5, 6),)),
        call(F(5, 4, 3), (None, I(4, 6, low=-4))),
        call(F(5, 4, 3), (I(5, 6), I(4, 6))),
        call(F(5, 4, 3), (I(5, 6, 1), None, I(3, 1, 4))),
        call(F(5, 4), (I(5),)),
        call(F(5, 4, 3), (None, I(4, 3, 2), I(3, 2))),
    ),
    "aten.index_select": (call(F(5, 4), 0, I(5, 7)), call(F(5, 4, 3), -2, I(4, 6))),
    "aten.take": (call(F(5, 4), I(20, 6)),),
    "aten.scatter.src": (
        call(F(5, 4), 1, Spec("i64", (5, 3), "permuted"), F(5, 3)),
        call(F(5, 4), 1, I(1, 5, 1), no_grad(F(5, 3))),
    ),
    "aten.scatter.value": (
        call(F(5, 4), 1, I(4, 5, 2), 2.0),
        call(F(5, 4), 0, I(5, 2, 4), 0),
    ),
    "aten.scatter_add": (
        call(F(5, 4), 1, I(4, 5, 6), F(5, 6)),
        call(F(5, 4), 0, I(5, 7, 3), no_grad(F(7, 4))),
        call(F(5, 4), 0, I(5, 3, 4), no_grad(F(7, 4))),
        call(F(6, 4), 1, I(4, 5, 6), F(5, 6)),
    ),
    "aten.scatter_reduce.two": (
        call(F(5, 4), 1, I(4, 5, 6), F(5, 6), "amax"),
        call(F(5, 4), 1, I(4, 5, 6), F(5, 6), "sum"),
    ),
    "aten.index_put": (
        call(F(5, 4, 3), (Spec("i64", (4,), "permuted"),), F(4, 4, 3)),
        call(F(5, 4, 3), (I(5, 6),), F(6, 4, 3), True),
        call(F(5, 4, 3), (I(5, 6), I(4, 6)), F(3), True),
        call(F(5, 4), (None, Spec("i64", (3,), "permuted")), F()),
    ),
    "aten.index_add": (call(F(5, 4), 0, I(5, 7), F(7, 4)), call(F(5, 4), 1, I(4, 6), F(5, 6), alpha=0.5)),
    "aten.index_copy": (call(F(5, 4), 1, Spec("i64", (3,), "permuted"), F(5, 3)),),
    "aten.index_fill.int_Scalar": (call(F(5, 4), 0, I(5, 3), 2.0), call(F(5, 4), 1, I(4, 3), 0)),
    "aten.one_hot": (call(I(6, 5, 3), 6),),
    "aten.topk": (call(F(5, 6), 2), call(F(5, 6, 3), 2, 1), call(F(5, 6), 6)),
    "aten.isin.Tensor_Tensor": (call(I(9, 5, 4), I(9, 3)),),
    "aten.bucketize.Tensor": (call(F(5, 6), UP),),
    "aten.searchsorted.Tensor": (call(UP, F(5, 6)), call(Spec("f64", (5, 7), "sorted"), F(5, 6))),
    # shapes
    "aten.view": (
        call(F(4, 6, 5), (24, 5)),
        call(F(4, 6), (4, 2, 3)),
        call(F(4, 6, 1), (1, 24)),
        call(F(8, 6), (4, 12)),
        call(F(4, 5, 6), (4, 30)),
        call(F(24, 5), (4, -1, 5)),
        call(F(6, 4), (4, 6)),
        call(F(2, 3, 4), (3, 8)),
        call(F(3, 8, 8, 2), (3, 4, 2, 4, 2, 2)),
        call(F(5), (5,)),
    ),
    "aten.reshape": (call(F(4, 6, 5), (24, 5)),),
    "aten._unsafe_view": (call(F(4, 6, 5), (24, 5)),),
    "aten.expand": (call(F(5, 1), (5, 4)), call(F(4), (5, 4)), call(F(1, 1, 4), (3, -1, 4)), call(F(), (5,))),
    "aten.permute": (call(F(3, 4, 5), (2, 0, 1)), call(F(3, 4, 5), (-1, 0, 1))),
    "aten.transpose.int": (call(F(3, 4, 5), 1, 2), call(F(3, 4, 5), -1, -3)),
    "aten.t": (call(F(5, 4)), call(F(5))),
    "aten.unsqueeze": (call(F(5, 4), 0), call(F(5, 4), -1), call(F(), 0)),
    "aten.squeeze.dim": (call(F(5, 1, 4), 1), call(F(5, 3, 4), 1)),
    "aten.squeeze.dims": (call(F(5, 1, 4, 1), (1, -1)), call(F(5, 3, 1), (1, 2))),
    "aten.squeeze": (call(F(5, 1, 2)),),
    "aten.cat": (
        call((F(5, 4), F(5, 3)), 1),
        call((F(5, 4), F(2, 4), F(1, 4))),
        call((F(3, 5, 4), F(3, 5, 4)), -1),
    ),
    "aten.stack": (call((F(5, 4), F(5, 4))), call((F(5, 4), F(5, 4), F(5, 4)), -1)),
    "aten.split.Tensor": (call(F(5, 6), 2, 1), call(F(5, 6), 3)),
    "aten.split_with_sizes": (call(F(5, 6), (2, 4), 1), call(F(5, 6), (1, 3, 1))),
    "aten.unsafe_split.Tensor": (call(F(5, 6), 2, 1),),
    "aten.chunk": (call(F(5, 6), 3, -1),),
    "aten.unbind.int": (call(F(3, 5, 4)), call(F(5, 3), 1)),
    "aten.select.int": (call(F(5, 4), 1, 2), call(F(5, 4, 3), -2, -1), call(F(5), 0, 0)),
    "aten.slice.Tensor": (
        call(F(5, 6), 1, 1, 4),
        call(F(5, 6), 0, 0, 9223372036854775807),
        call(F(5, 6), -1, 0, -1, 2),
        call(F(5, 6)),
    ),
    "aten.glu": (call(F(5, 6), -1), call(F(4, 5, 6), 0)),
    "aten.unfold": (call(F(5, 8), 1, 3, 2), call(F(8, 5, 2), 0, 8, 1)),
    "aten.diff": (call(F(5, 6)), call(F(5, 6), 1, 0, F(1, 6)), call(F(5, 6), 1, -1, F(5, 1))),
    "aten.pad": (
        call(F(5, 6), (1, 2)),
        call(F(5, 6), (1, -1)),
        call(F(3, 5, 6), (0, 0, 2, 0), "constant", 1.0),
        call(F(3, 5, 6), (1, 2), "reflect"),
    ),
    "aten.constant_pad_nd": (call(F(5, 6), (1, 2)), call(F(5, 6), (1, -1)), call(F(5, 6), (0, 0, 1, 0), 2.0)),
    "aten.slice_scatter": (call(F(5, 6), F(5, 3), 1, 2, 5), call(F(5, 6), F(2, 6), 0, 0, 2)),
    "aten.select_scatter": (call(F(5, 6), F(5), 1, 2),),
    "aten.repeat": (call(F(5, 1), (1, 4)), call(F(5, 4), (2, 1, 3)), call(F(4), (5, 1)), call(F(5), (4,))),
    "aten.repeat_interleave.self_int": (
        call(F(5, 4), 3, 1),
        call(F(5), 2),
        call(F(5, 4), 2, -2, output_size=10),
        call(F(5, 1), 6, 1),
    ),
    "aten.repeat_interleave.Tensor": (call(Spec("i64", (5,), "permuted", 2), output_size=10),),
    "aten.flip": (call(F(5, 4), (1,)), call(F(5, 4, 3), (0, -1))),
    "aten.roll": (call(F(5, 4), (1,), (1,)), call(F(5, 4, 3), (1, -1), (0, -1)), call(F(5, 4), (3,))),
    "aten.rot90": (call(F(5, 4)), call(F(3, 5, 4), 3, (1, 2)), call(F(3, 5, 4), 2, (0, 1))),
    "aten.linalg_cross": (call(F(5, 3), F(5, 3)), call(F(5, 3, 4), F(5, 3, 4), dim=1)),
    "aten.renorm": (call(F(5, 4), 2, 0, 0.5), call(F(5, 4, 3), 2, 1, 0.5)),
    "aten.diag_embed": (call(F(5, 4)), call(F(5, 4, 3), 1, 0, 2)),
    "aten.max_unpool2d": (
        call(F(3, 4, 1, 4), Spec("i64", (3, 4, 1, 4), "permuted"), (2, 4)),
        call(Spec("f64", (3, 4, 2, 4), "alike"), I(2, 3, 4, 2, 4), (3, 5)),
    ),
    "aten.max_unpool3d": (
        call(F(3, 4, 1, 1, 4), Spec("i64", (3, 4, 1, 1, 4), "permuted"), (1, 2, 4), (1, 2, 1), (0, 0, 0)),
    ),
    "aten.affine_grid_generator": (
        call(F(5, 2, 3), (5, 3, 4, 6), False),
        call(F(5, 3, 4), (5, 2, 3, 2, 4), True),
    ),
    "aten.tril": (call(F(3, 5, 4)), call(F(5, 5), -1)),
    "aten.triu": (call(F(3, 5, 4)), call(F(5, 5), 1)),
    "aten.diagonal": (call(F(5, 4)), call(F(5, 4, 3), 1, -1, 0)),
    "aten.pixel_shuffle": (call(F(3, 16, 3, 5), 2), call(F(12, 4, 5), 2), call(F(3, 25, 1, 1), 5)),
    "aten.pixel_unshuffle": (call(F(3, 4, 6, 8), 2), call(F(3, 1, 5, 5), 5)),
    "aten.channel_shuffle": (call(F(5, 6, 3), 3),),
    "aten.im2col": (
        call(F(3, 4, 5, 6), (2, 2), (1, 1), (0, 0), (1, 1)),
        call(F(3, 1, 5, 6), (2, 3), (1, 1), (0, 0), (2, 3)),
    ),
    "aten.col2im": (
        call(F(3, 16, 20), (5, 6), (2, 2), (1, 1), (0, 0), (1, 1)),
        call(F(3, 6, 4), (4, 6), (2, 3), (1, 1), (0, 0), (2, 3)),
    ),
    "aten.grid_sampler": (call(F(3, 4, 5, 6), P(3, 4, 5, 2), 0, 0, False),),
    "aten.grid_sampler_2d": (call(F(3, 4, 5, 6), P(3, 4, 5, 2), 0, 0, False),),
    "aten.meshgrid": (call((F(5), F(4))),),
    "aten.meshgrid.indexing": (
        call((F(5), F(4), F(3)), indexing="ij"),
        call((F(5), F(4), F(3)), indexing="xy"),
    ),
    "aten.fft_fftn": (call(F(5, 4, 3), None, (1, 2)), call(C(5, 4))),
    "aten.fft_fft": (call(F(5, 4)), call(C(5, 4), None, 0)),
    "aten.stft": (
        call(F(5, 16), 4, 2, 4, no_grad(P(4)), False, True, True),
        call(F(5, 16), 4, 2, None, None, False, True, False),
        call(F(16), 4, 2, 4, no_grad(P(4)), False, True, True),
    ),
    "aten.fft_ifft": (call(C(5, 4)), call(F(5, 4), None, 0)),
    "aten.fft_ifftn": (call(C(5, 4, 3), None, (1, 2)), call(C(5, 4))),
    "aten.fft_fft2": (call(F(5, 4, 3)), call(C(5, 4, 3), None, (0, 1))),
    "aten.fft_ifft2": (call(C(5, 4, 3)),),
    "aten.fft_rfft": (call(F(5, 6)), call(F(5, 6, 3), None, 1)),
    "aten.fft_irfft": (call(C(5, 4)), call(C(5, 4, 3), 7, 1)),
    "aten.fft_rfft2": (call(F(5, 4, 6)),),
    "aten.fft_irfft2": (call(C(5, 4, 3)),),
    "aten.fft_rfftn": (call(F(5, 4, 6), None, (1, 2)), call(F(4, 6))),
    "aten.fft_irfftn": (call(C(5, 4, 3), (4, 5), (1, 2)), call(C(4, 3))),
    "aten.view_as_real": (call(C(5, 4)),),
    "aten.view_as_complex": (call(F(5, 4, 2)),),
    # factories
    "aten.full": (call((5, 4), 2.0, dtype=DType("f64")),),
    "aten.zeros": (call((5, 4), dtype=DType("f64")),),
    "aten.ones": (call((5, 4), dtype=DType("f64")),),
    "aten.empty.memory_format": (call((5, 4), dtype=DType("f64")),),
    "aten.new_zeros": (call(F(3, 4), (5, 6)),),
    "aten.new_ones": (call(F(3, 4), (5, 6)),),
    "aten.new_full": (call(F(3, 4), (5, 6), 2.0),),
    "aten.new_empty": (call(F(3, 4), (5, 6)),),
    "aten.arange": (call(7, dtype=DType("i64")),),
    "aten.arange.start": (call(2, 9, dtype=DType("i64")), call(0, 5, dtype=DType("f64"))),
    "aten.arange.start_step": (call(2, 12, 2, dtype=DType("i64")), call(0, 1, 0.2, dtype=DType("f64"))),
    "aten.linspace": (call(0.0, 1.0, 5, dtype=DType("f64")),),
    "aten.logspace": (call(0.0, 1.0, 5, dtype=DType("f64")),),
    "aten.hann_window": (call(5, dtype=DType("f64")),),
    "aten.hann_window.periodic": (call(5, False, dtype=DType("f64")),),
    "aten.hamming_window": (call(5, dtype=DType("f64")),),
    "aten.eye": (call(5, dtype=DType("f64")),),
    "aten.eye.m": (call(5, 4, dtype=DType("f64")),),
    "aten.tril_indices": (call(5, 4, -1, dtype=DType("i64")),),
    "aten.triu_indices": (call(5, 4, 1, dtype=DType("i64")),),
    "aten.scalar_tensor": (call(2.0, dtype=DType("f64")),),
    # random numbers
    "aten.native_dropout": (call(F(5, 4), 0.4, True), call(F(3, 5, 4), 0.0, True)),
    "aten.bernoulli": (call(P(5, 4)),),
    "aten.bernoulli.p": (call(F(5, 4), 0.7),),
    "aten.rand_like": (call(F(5, 4)),),
    "aten.randn_like": (call(F(5, 4)),),
    "aten.rand": (call((5, 4), dtype=DType("f64")),),
    "aten.randn": (call((5, 4), dtype=DType("f64")),),
}


def _fill_in() -> None:
    """Samples of the rows that go by families."""
    families: dict[str, tuple[Sample, ...]] = {}
    families |= dict.fromkeys(aten.UNARY, _UNARY) | dict.fromkeys(aten.LINEAR_UNARY, _UNARY)
    families |= dict.fromkeys(
        "log log2 log10 sqrt rsqrt acos asin atanh erfinv logit lgamma digamma reciprocal".split(), _POSITIVE
    )
    families["acosh"] = (call(Spec("f64", (5, 4), "above_one")),)
    families["log1p"] = _POSITIVE
    families |= dict.fromkeys("logical_not bitwise_not".split(), (call(B(5, 4)), call(B(1, 6, 3))))
    families |= {op: _SCALAR for op in aten.UNARY + aten.LINEAR_UNARY if op.endswith(".Scalar")}
    families |= dict.fromkeys("clamp_min clamp_max".split(), _SCALAR)
    fixed = (call(no_grad(F(5, 4)), no_grad(P(5, 4))), call(no_grad(F(5, 4)), no_grad(P(4))))
    integer = "bitwise_and bitwise_or bitwise_xor __and__ __or__ __lshift__ __rshift__"
    families |= {f"{op}.Scalar": _INT_SCALAR for op in integer.split()}
    families |= dict.fromkeys(aten.BINARY, _BINARY)
    families |= {f"{op}.Tensor": _INT_BINARY for op in integer.split()}
    by_number = (*_BINARY, call(F(5, 4), F()), call(F(5, 4), 0.3))
    families |= dict.fromkeys("add.Tensor sub.Tensor mul.Tensor".split(), by_number)
    families |= dict.fromkeys("heaviside floor_divide".split(), fixed)
    families["floor_divide.Scalar"] = (call(no_grad(F(5, 4)), 0.3),)
    families["soft_margin_loss"] = tuple(call(F(5, 4), no_grad(F(5, 4)), k) for k in (SUM, 0, 1))
    families |= {op: _REDUCE if at == aten.ALL else _REDUCE_DIM for op, at in aten.WHOLE_DIMS.items()}
    families |= {op: _ALONG for op in aten.ALONG_DIM}
    families |= {
        op: (call(F(5, 4), -1, False), call(F(5, 4, 3), 1, False)) for op in ("_softmax", "_log_softmax")
    }
    families["sort"] = families["argsort"] = (call(F(5, 4)), call(F(5, 4, 3), 1, True))
    families["sort.stable"] = (call(F(5, 4), stable=True), call(F(5, 4, 3), stable=True, dim=1))
    families["argsort.stable"] = (call(F(5, 4), stable=True), call(F(5, 4, 3), stable=True, dim=1))
    families["cumsum"] = _ALONG
    families |= dict.fromkeys("mse_loss l1_loss smooth_l1_loss huber_loss".split(), _LOSS)
    equal = (call(I(3, 5, 4), I(3, 5, 4)), call(I(3, 5, 4), I(3, 4)))
    families |= dict.fromkeys("eq.Tensor ne.Tensor".split(), equal)
    families |= dict.fromkeys("eq.Scalar ne.Scalar".split(), (call(I(3, 5, 4), 1), call(I(3, 6), 2)))
    logical = (call(B(5, 4), B(5, 4)), call(B(3, 1, 4), B(5, 1)))
    families |= dict.fromkeys("logical_and logical_or logical_xor".split(), logical)
    for op, kind in ("any", "one"), ("all", "all_but_one"):
        flat, deep = Spec("bool", (5, 4), kind), Spec("bool", (3, 4, 5), kind)
        families[op] = (call(flat),)
        families[f"{op}.dim"] = (call(flat, 1), call(deep, -2, True))
        families[f"{op}.dims"] = (call(flat, (1,)), call(deep, (0, -1), True))
    for op in aten.POOLS + aten.LINEAR_POOLS + aten.SPATIAL + aten.RESAMPLERS:
        families[op] = _pool(op)
    for op, samples in families.items():
        SAMPLES.setdefault(f"aten.{op}", samples)


def _pool(op: str) -> tuple[Sample, ...]:
    spatial = int(next(c for c in op if c.isdigit()))
    batched, single = F(3, 4, *(8, 6, 4)[:spatial]), F(4, *(8, 6, 4)[:spatial])
    size = (3, 5, 2)[:spatial]
    if "upsample" in op:
        extra: tuple[Arg, ...] = () if "nearest" in op else (False,)
        return (call(batched, size, *extra, *((None,) if op.endswith(".vec") else ())),)
    if op.startswith(("adaptive", "_adaptive")):
        return (call(batched, size), call(single, size)) if op[0] != "_" else (call(batched, size),)
    if "_pad" in op:
        return (call(batched, (1, 2) * spatial), call(single, (1, 2) * spatial))
    ones, twos, threes = (1,) * spatial, (2,) * spatial, (3,) * spatial
    return (call(batched, twos), call(single, threes, twos, ones), call(batched, batched.shape[2:]))


_fill_in()
