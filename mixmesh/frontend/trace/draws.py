"""Rewrites random operators to ``rand`` and ``randn``, whose numbers the runtime defines on any device."""

from __future__ import annotations

import torch

from ...lang.ir import DType, Node, Ref
from .build import Builder, Rule
from .dtypes import TORCH_DTYPE
from .schema import bound

MAX_SPAN = 2**53  # the number of integers that a uniform number in f64 can distinguish


def randint(b: Builder, node: Node) -> tuple[Ref] | None:
    """Integers from ``low`` up to but not including ``high``: floor(u * (high - low)) + low."""
    arg = bound(node)
    low, high = arg.get("low") or 0, arg["high"]
    if isinstance(high, Ref) or high - low > MAX_SPAN:
        return None
    (kind,) = node.types
    scaled = b("aten.mul.Tensor", b("aten.rand", kind.shape, dtype=DType("f64")), float(high - low))
    drawn = b("aten._to_copy", b("aten.floor", scaled), dtype=DType(kind.dtype))
    return (b("aten.add.Tensor", drawn, low) if low else drawn,)


def randperm(b: Builder, node: Node) -> tuple[Ref] | None:
    if node.types[0].dtype != "i64":
        return None
    return (b("aten.argsort", b("aten.rand", node.types[0].shape, dtype=DType("f64"))),)


def normal(b: Builder, node: Node) -> tuple[Ref] | None:
    """mean + std * z; mean and std are numbers or tensors."""
    (kind,) = node.types
    arg = bound(node)
    z = b("aten.randn", kind.shape, dtype=DType(kind.dtype))
    return (b("aten.add.Tensor", b("aten.mul.Tensor", z, arg["std"]), arg["mean"]),)


def uniform(b: Builder, node: Node) -> tuple[Ref]:
    arg = bound(node)
    low, high = arg["from"], arg["to"]
    return (b("aten.add.Tensor", b("aten.mul.Tensor", _rand(b, node), high - low), low),)


def exponential(b: Builder, node: Node) -> tuple[Ref]:
    """-log(1 - u) / lambda, but never 0: samplers divide by it and take its logarithm."""
    return (b("aten.div.Tensor", _exponential(b, _rand(b, node)), bound(node)["lambd"]),)


def multinomial(b: Builder, node: Node) -> tuple[Ref]:
    """Draws classes by their weights: takes the class with the largest weight / exponential. Taking the
    classes with the largest few is a draw without replacement; with replacement, every draw has exponentials
    of its own."""
    arg = bound(node)
    weights, count = arg["self"], arg["num_samples"]
    if arg["replacement"] and count > 1:
        weights = b("aten.unsqueeze", weights, -2)
        shape = b.type(weights).shape
        weights = b("aten.expand", weights, (*shape[:-2], count, shape[-1]))
    kind = b.type(weights)
    e = _exponential(b, b("aten.rand", kind.shape, dtype=DType(kind.dtype)))
    keys = b("aten.div.Tensor", weights, e)
    if arg["replacement"] and count > 1:
        return (b("aten.argmax", keys, -1),)
    return (b.all("aten.topk", keys, count, -1)[1],)


def rrelu(b: Builder, node: Node) -> tuple[Ref]:
    """Multiplies values below zero by a random slope in training, and by the mean slope otherwise."""
    arg = bound(node)
    x, low, high = arg["self"], arg["lower"], arg["upper"]
    if not arg["training"]:
        return (b("aten.leaky_relu", x, (low + high) / 2),)
    slope = b("aten.add.Tensor", b("aten.mul.Tensor", _rand(b, node), high - low), low)
    return (b("aten.where.self", b("aten.ge.Scalar", x, 0), x, b("aten.mul.Tensor", x, slope)),)


def _rand(b: Builder, node: Node) -> Ref:
    (kind,) = node.types
    return b("aten.rand", kind.shape, dtype=DType(kind.dtype))


def _exponential(b: Builder, u: Ref) -> Ref:
    e = b("aten.neg", b("aten.log1p", b("aten.neg", u)))
    return b("aten.clamp_min", e, torch.finfo(TORCH_DTYPE[b.type(u).dtype]).eps / 2)


DRAW_RULES: dict[str, Rule] = {
    "aten.randint": randint,
    "aten.randint.low": randint,
    "aten.randint_like": randint,
    "aten.randint_like.low_dtype": randint,
    "aten.randperm": randperm,
    "aten.normal_functional": normal,
    **{f"aten.normal.{o}": normal for o in ("float_float", "Tensor_float", "float_Tensor", "Tensor_Tensor")},
    "aten.uniform": uniform,
    "aten.exponential": exponential,
    "aten.multinomial": multinomial,
    "aten.rrelu": rrelu,
}
