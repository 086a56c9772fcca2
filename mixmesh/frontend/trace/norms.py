"""Batch normalisation as sums over the whole batch and what follows from them, so that it stays exact on
shards (``operators``), or as each rank's own where that is asked for."""

from __future__ import annotations

from ...lang.ir import LOCAL_NORM, DType, Node, Ref
from ...lang.ir.local_norms import EXACT, LOCAL
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
        return None  # the saved statistics are read
    eps = arg.get("eps", arg.get("epsilon"))
    if not arg.get("training", "no_training" not in node.op):
        return (_with_given_statistics(b, arg, eps), *[None] * (len(node.results) - 1))
    x = arg["input"]
    count = b.type(x).num_elements // b.type(x).shape[1]
    moments = b("mixmesh.moments", x)
    y = b("mixmesh.normalise", x, moments, arg["weight"], arg["bias"], count, eps)
    moved: tuple[Ref | None, ...] = (None, None)
    if any(r is not None for r in node.results[3:5]):
        running = (arg["running_mean"], arg["running_var"])
        momentum = arg.get("momentum", arg.get("exponential_average_factor"))
        moved = b.all("mixmesh.running_statistics", moments, *running, count, momentum)
        for result, old in zip(node.results[3:5], running):
            if result is not None:
                b.types[result] = b.type(old)  # for a half module export says f32, against the buffer
    return (y, None, None, *moved, *[None] * len(node.results))[: len(node.results)]


def local_batch_norm(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    """As ``batch_norm``, but that in training each rank takes the statistics of its own samples
    (torch.nn.BatchNorm2d under DistributedDataParallel)."""
    arg = bound(node)
    if any(r is not None for r in node.results[1:3]):
        return None  # the saved statistics are read
    if not arg.get("training", "no_training" not in node.op):
        return batch_norm(b, node)
    eps = arg.get("eps", arg.get("epsilon"))
    momentum = arg.get("momentum", arg.get("exponential_average_factor"))
    running = [arg.get(name) for name in ("running_mean", "running_var")]
    inputs = (arg["input"], arg["weight"], arg["bias"], *running)
    y, *moved = b.all(LOCAL_NORM, *inputs, momentum, eps)
    if running[0] is None:
        moved = [None, None]
    for result, old in zip(node.results[3:5], running):
        if result is not None:
            b.types[result] = b.type(old)  # for a half module export says f32, against the buffer
    return (y, None, None, *moved, *[None] * len(node.results))[: len(node.results)]


def _with_given_statistics(b: Builder, arg: dict, eps: float) -> Ref:
    source = arg["input"]
    x = _cast(b, source, "f32") if b.type(source).dtype in HALF else source
    dtype, shape = b.type(x).dtype, b.type(x).shape

    def along(r: Ref) -> Ref:
        return b("aten.view", _cast(b, r, dtype), (1, shape[1]) + (1,) * (len(shape) - 2))

    mean, var = (along(arg[name]) for name in ("running_mean", "running_var"))
    scale = b("aten.rsqrt", b("aten.add.Tensor", var, eps))
    if arg["weight"] is not None:
        scale = b("aten.mul.Tensor", scale, along(arg["weight"]))
    y = b("aten.mul.Tensor", b("aten.sub.Tensor", x, mean), scale)
    if arg["bias"] is not None:
        y = b("aten.add.Tensor", y, along(arg["bias"]))
    return _cast(b, y, b.type(source).dtype)


def _cast(b: Builder, x: Ref, dtype: str) -> Ref:
    return x if b.type(x).dtype == dtype else b("aten._to_copy", x, dtype=DType(dtype))


_NAMES = (
    "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional", "_batch_norm_no_update", "cudnn_batch_norm",
)  # fmt: skip
NORM_RULES: dict[str, dict[str, Rule]] = {  # by whose statistics are taken
    EXACT: {f"aten.{name}": batch_norm for name in _NAMES},
    LOCAL: {f"aten.{name}": local_batch_norm for name in _NAMES},
}
