"""Rewrites batch normalisation to sums over the whole batch, which stay exact on shards (``operators``), or
to statistics of each rank's own samples."""

from __future__ import annotations

from ...lang.ir import LOCAL_NORM, Arg, Node, Ref
from ...lang.ir.local_norms import EXACT, LOCAL
from .build import Builder, Rule
from .losses import HALF, cast
from .schema import bound


def batch_norm(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    """In training, y = (x - mean) / sqrt(var + eps) * weight + bias over all dims but 1, and running
    statistics move by ``momentum`` towards the mean and the unbiased variance (torch.nn.BatchNorm2d).
    Otherwise mean and var are the running statistics. Statistics of half types are computed in f32.
    """
    arg = bound(node)
    if any(r is not None for r in node.results[1:3]):
        return None  # it uses the saved statistics
    if not arg.get("training", "no_training" not in node.op):
        return (_with_fixed_statistics(b, arg), *[None] * (len(node.results) - 1))
    x = arg["input"]
    count = b.type(x).num_elements // b.type(x).shape[1]
    moments = b("mixmesh.moments", x)
    y = b("mixmesh.normalise", x, moments, arg["weight"], arg["bias"], count, _eps(arg))
    if all(r is None for r in node.results[3:5]):
        return _results(node, y)
    running = (arg["running_mean"], arg["running_var"])
    statistics = b.all("mixmesh.running_statistics", moments, *running, count, _momentum(arg))
    return _results(node, y, *_updates(b, node, running, statistics))


def local_batch_norm(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    """Rewrites like ``batch_norm``, but in training each rank uses the statistics of its own samples (as
    torch.nn.BatchNorm2d does under DistributedDataParallel)."""
    arg = bound(node)
    if any(r is not None for r in node.results[1:3]):
        return None  # it uses the saved statistics
    if not arg.get("training", "no_training" not in node.op):
        return batch_norm(b, node)
    running = (arg.get("running_mean"), arg.get("running_var"))
    inputs = (arg["input"], arg["weight"], arg["bias"], *running)
    y, *statistics = b.all(LOCAL_NORM, *inputs, _momentum(arg), _eps(arg))
    if running[0] is None:
        return _results(node, y)
    return _results(node, y, *_updates(b, node, running, tuple(statistics)))


def _results(node: Node, y: Ref, *statistics: Ref) -> tuple[Ref | None, ...]:
    """Pads the results to the number that the node has: the second and third are statistics saved for the
    backward pass."""
    return (y, None, None, *statistics, *[None] * len(node.results))[: len(node.results)]


def _updates(
    b: Builder, node: Node, running: tuple[Arg, ...], statistics: tuple[Ref, ...]
) -> tuple[Ref, ...]:
    """Returns ``statistics``, the new values of the ``running`` ones, after correcting the node's types."""
    for result, old in zip(node.results[3:5], running):
        if result is not None:
            b.types[result] = b.type(old)  # export has f32 here for a half module, whose buffers are half
    return statistics


def _eps(arg: dict[str, Arg]) -> float:
    return arg["eps"] if "eps" in arg else arg["epsilon"]


def _momentum(arg: dict[str, Arg]) -> float:
    return arg["momentum"] if "momentum" in arg else arg["exponential_average_factor"]


def _with_fixed_statistics(b: Builder, arg: dict[str, Arg]) -> Ref:
    source, eps = arg["input"], _eps(arg)
    x = cast(b, source, "f32") if b.type(source).dtype in HALF else source
    dtype, shape = b.type(x).dtype, b.type(x).shape

    def along(r: Ref) -> Ref:
        return b("aten.view", cast(b, r, dtype), (1, shape[1]) + (1,) * (len(shape) - 2))

    mean, var = (along(arg[name]) for name in ("running_mean", "running_var"))
    scale = b("aten.rsqrt", b("aten.add.Tensor", var, eps))
    if arg["weight"] is not None:
        scale = b("aten.mul.Tensor", scale, along(arg["weight"]))
    y = b("aten.mul.Tensor", b("aten.sub.Tensor", x, mean), scale)
    if arg["bias"] is not None:
        y = b("aten.add.Tensor", y, along(arg["bias"]))
    return cast(b, y, b.type(source).dtype)


_NAMES = (
    "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update_functional", "_batch_norm_no_update", "cudnn_batch_norm",
)  # fmt: skip
NORM_RULES: dict[str, dict[str, Rule]] = {  # by the kind of statistics, "exact" or "local"
    EXACT: {f"aten.{name}": batch_norm for name in _NAMES},
    LOCAL: {f"aten.{name}": local_batch_norm for name in _NAMES},
}
