"""Batch normalisation as means over the whole batch, so that it stays exact on shards."""

from __future__ import annotations

from ..ir import DType, Node, Ref
from .build import Builder, Rule
from .losses import HALF
from .schema import bound


def batch_norm(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    """Training: y = (x - mean) / sqrt(var + eps) * weight + bias over all dims but 1; running statistics
    move by ``momentum`` towards the mean and the unbiased variance (torch.nn.BatchNorm2d). Otherwise the
    running statistics stand for mean and var. Statistics of half types are computed in f32.
    """
    arg = bound(node)
    if any(r is not None for r in node.results[1:3]):
        return None  # somebody reads the saved statistics
    source = arg["input"]
    x = _cast(b, source, "f32") if b.type(source).dtype in HALF else source
    shape = b.type(x).shape
    along = (1, shape[1]) + (1,) * (len(shape) - 2)
    running = (arg.get("running_mean"), arg.get("running_var"))
    momentum = arg.get("momentum", arg.get("exponential_average_factor"))
    moved: tuple[Ref | None, ...] = ()
    if arg.get("training", "no_training" not in node.op):
        dims = tuple(d for d in range(len(shape)) if d != 1)
        mean = b("aten.mean.dim", x, dims, True)
        centred = b("aten.sub.Tensor", x, mean)
        var = b("aten.mean.dim", b("aten.mul.Tensor", centred, centred), dims, True)
        count = b.type(x).num_elements // shape[1]
        for result, old, new, factor in zip(
            node.results[3:5], running, (mean, var), (1.0, count / max(count - 1, 1))
        ):
            if result is not None:
                b.types[result] = b.type(old)  # for a half module export says f32, against the buffer
            moved += (None if result is None else _move(b, old, new, momentum, factor),)
    else:
        mean, var = (b("aten.view", _cast(b, r, b.type(x).dtype), along) for r in running)
        centred = b("aten.sub.Tensor", x, mean)
    scale = b("aten.rsqrt", b("aten.add.Tensor", var, arg.get("eps", arg.get("epsilon"))))
    if arg["weight"] is not None:
        weight = b("aten.view", _cast(b, arg["weight"], b.type(x).dtype), along)
        scale = b("aten.mul.Tensor", scale, weight)
    y = b("aten.mul.Tensor", centred, scale)
    if arg["bias"] is not None:
        y = b("aten.add.Tensor", y, b("aten.view", _cast(b, arg["bias"], b.type(x).dtype), along))
    y = _cast(b, y, b.type(source).dtype)
    saved = (None,) * (min(len(node.results), 3) - 1)
    return (y, *saved, *moved, *(None,) * max(0, len(node.results) - 3 - len(moved)))


def _move(b: Builder, old: Ref, new: Ref, momentum: float, factor: float) -> Ref:
    """(1 - momentum) * old + momentum * factor * new, in the type of ``new``"""
    flat = b("aten.view", b("aten.detach", new), b.type(old).shape)
    kept = b("aten.mul.Tensor", _cast(b, old, b.type(new).dtype), 1 - momentum)
    return _cast(
        b, b("aten.add.Tensor", kept, b("aten.mul.Tensor", flat, momentum * factor)), b.type(old).dtype
    )


def _cast(b: Builder, x: Ref, dtype: str) -> Ref:
    return x if b.type(x).dtype == dtype else b("aten._to_copy", x, dtype=DType(dtype))


NORM_RULES: dict[str, Rule] = {
    f"aten.{name}": batch_norm
    for name in (
        "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update_functional", "_batch_norm_no_update", "cudnn_batch_norm",
    )
}  # fmt: skip
