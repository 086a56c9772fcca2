"""Scaled dot product attention: one name for all its kernels, and separate operators where it has dropout."""

from __future__ import annotations

import math

from ...lang.ir import Arg, DType, Node, Ref
from .build import Builder, Rule
from .schema import bound

SDPA = "aten.scaled_dot_product_attention"


def attention(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    """Replaces the name of a kernel by ``SDPA``; with dropout, writes out the formula of PyTorch's
    documentation."""
    if any(r is not None for r in node.results[1:]):
        return None
    arg = bound(node)
    mask = arg.get("attn_mask", arg.get("attn_bias"))
    if arg["dropout_p"]:
        out = explicit_attention(b, arg, mask)
    elif node.op == SDPA:
        return None
    else:
        inputs = arg["query"], arg["key"], arg["value"], mask
        out = b(SDPA, *inputs, 0.0, arg["is_causal"], scale=arg["scale"])
    return (out,) + (None,) * (len(node.results) - 1)


def explicit_attention(b: Builder, arg: dict[str, Arg], mask: Ref | None) -> Ref:
    """Attention with dropout in separate operators."""
    q, k, v, scale = arg["query"], arg["key"], arg["value"], arg["scale"]
    if arg.get("enable_gqa", False):
        k, v = repeat_heads(b, k, q), repeat_heads(b, v, q)
    scaled = b("aten.mul.Tensor", q, scale if scale is not None else 1 / math.sqrt(b.type(q).shape[-1]))
    scores = b("aten.matmul", scaled, b("aten.transpose.int", k, -2, -1))
    if arg["is_causal"]:
        shape = b.type(scores).shape[-2:]
        past = b("aten.tril", b("aten.full", shape, True, dtype=DType("bool")))
        scores = _masked(b, scores, past)
    if mask is not None and b.type(mask).dtype == "bool":
        scores = _masked(b, scores, mask)
    elif mask is not None:
        scores = b("aten.add.Tensor", scores, mask)
    # where all keys of a row are masked, the kernels give zeros and a plain softmax NaN
    weights = b("aten.softmax.int" if mask is None else "aten._safe_softmax", scores, -1)
    return b("aten.matmul", b("aten.native_dropout", weights, arg["dropout_p"], True), v)


def _masked(b: Builder, scores: Ref, keep: Ref) -> Ref:
    return b("aten.masked_fill.Scalar", scores, b("aten.logical_not", keep), -math.inf)


def repeat_heads(b: Builder, x: Ref, like: Ref) -> Ref:
    """Repeats each head of [..., h, s, d] to get the H heads of ``like`` (grouped-query attention)."""
    *outer, heads, length, width = b.type(x).shape
    times = b.type(like).shape[-3] // heads
    if times == 1:
        return x
    each = b("aten.unsqueeze", x, len(outer) + 1)
    each = b("aten.expand", each, (*outer, heads, times, length, width))
    return b("aten.view", each, (*outer, heads * times, length, width))


ATTENTION_RULES: dict[str, Rule] = {
    name: attention
    for name in (
        SDPA,
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    )
}
