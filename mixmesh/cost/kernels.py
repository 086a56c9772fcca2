"""Seconds of operators on a GPU that was not profiled: their class, their kernels, their backward pass.

An operator takes as long as its arithmetic or its memory traffic, whichever is longer (Williams et al.,
2009), each at the ``efficiency`` of its class. The time to issue it is separate (``model``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import Device
from ..lang.rules import Call
from . import efficiency as e
from .work import HALF, MEMORY_BOUND_OWN, VIEWS, call_flop, is_product, moved_bytes, product_size

THIN_BELOW = 128  # a product with a side below this fills no tile of a large kernel
CONVOLUTIONS = "aten.conv"
ATTENTION = "aten.scaled_dot_product_attention"
NORMS = frozenset(
    "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm batch_norm "
    "native_batch_norm instance_norm _native_batch_norm_legit_functional".split()
)
SOFTMAX = frozenset("softmax log_softmax _softmax _log_softmax _safe_softmax".split())
ACTIVATIONS = frozenset(
    "relu gelu silu sigmoid tanh elu leaky_relu hardtanh hardswish hardsigmoid softplus mish relu6 celu selu "
    "log_sigmoid prelu _prelu_kernel glu native_dropout".split()
)
COPIES = frozenset(
    "_to_copy to contiguous clone cat stack pad constant_pad_nd add sub neg sum mean copy roll flip "
    "repeat".split()
)
LOOKUPS = frozenset("embedding gather index index_select take".split())
REDUCTIONS = frozenset("amax amin max min sum mean var logsumexp cross_entropy_loss nll_loss".split())
OF_ROWS = NORMS | SOFTMAX | REDUCTIONS

# Backward over forward seconds. Products: two products, of which the weight's is slower; measured layers of
# language models take 2.1 to 2.8 times the forward pass. Depthwise: the weight's gradient reads everything
# for few numbers. Attention: 2.5 times the multiply-adds (Dao, FlashAttention-2, 2023, section 4) at 63
# instead of 73 % of the peak. Softmax, norms, activations and dropout: 2 to 2.5 in the same measurements,
# while their bytes suggest 1.5 to 2.5. The gradient of a sum or a copy is added or copied.
PER_GRADIENT = {e.PRODUCT: 1.1, e.THIN: 1.15, e.CONVOLUTION: 1.15, e.DEPTHWISE: 1.5}
ATTENTION_BACKWARD = 2.8
NORM_BACKWARD, SOFTMAX_BACKWARD, ACTIVATION_BACKWARD, COPY_BACKWARD = 2.5, 2.25, 2.25, 1.0
OTHER_BACKWARD = 1.5
# masked_fill is a copy that is then filled, and so is its gradient
PASSES = {**MEMORY_BOUND_OWN, "aten.masked_fill.Scalar": (2.0, 2.0), "aten.masked_fill.Tensor": (2.0, 2.0)}


@dataclass(frozen=True)
class Kernels:
    """The kernels of one pass of an operator: their number, their constant seconds, and the seconds of the
    whole work."""

    count: int
    ramp_s: float
    full_s: float


NONE = Kernels(0, 0.0, 0.0)


def class_of(call: Call) -> str:
    """The row of the table of efficiencies that an operator falls under."""
    if not is_product(call):
        name = base_name(call)
        return e.LOOKUP if name in LOOKUPS else e.REDUCTION if name in OF_ROWS else e.ELEMENTWISE
    if call.op == ATTENTION:
        return e.ATTENTION
    if call.op.startswith(CONVOLUTIONS):
        return e.DEPTHWISE if is_depthwise(call) else e.CONVOLUTION
    size = product_size(call)
    return e.PRODUCT if size is not None and size.least >= THIN_BELOW else e.THIN


def base_name(call: Call) -> str:
    """The name of an operator without its namespace and overload."""
    return call.op.partition(".")[2].partition(".")[0]


def is_depthwise(call: Call) -> bool:
    """Whether every channel is convolved separately: the weight has one input channel, the data several."""
    x, weight = call.inputs[0].shape, call.inputs[1].shape
    return len(weight) > 2 and weight[1] == 1 and x[len(x) - len(weight) + 1] > 1


def arithmetic(call: Call, device: Device, tf32: bool) -> str:
    """The dtype whose rate a product reaches. PyTorch by default lets convolutions and recurrent layers use
    TF32 (``torch.backends.cudnn.allow_tf32``), but matrix products only on request (``tf32``)."""
    dtypes = {t.dtype for t in call.outputs}
    if not dtypes.isdisjoint(HALF):
        return e.HALF
    by_cudnn = call.op.startswith(CONVOLUTIONS) or call.op.endswith(".input")
    return e.TF32 if "f32" in dtypes and device.tf32_flop_per_s and (tf32 or by_cudnn) else e.F32


def kernels(call: Call, grads: int, device: Device, *, tf32: bool) -> tuple[Kernels, Kernels]:
    """The kernels of both passes of the whole call. ``grads`` is how many of its inputs take a gradient."""
    if call.op in VIEWS:
        return NONE, NONE
    if is_product(call):
        return products(call, grads, device, tf32)
    row = e.efficiency(class_of(call), e.ANY, device)
    forward_bytes, backward_bytes = passed_bytes(call, grads)
    rate = device.memory_bytes_per_s * row.share
    backward_s = row.backward * backward_bytes / rate
    backward = Kernels(1, row.ramp_s, backward_s) if grads and backward_s else NONE
    return Kernels(1, row.ramp_s, forward_bytes / rate), backward


def products(call: Call, grads: int, device: Device, tf32: bool) -> tuple[Kernels, Kernels]:
    name = class_of(call)
    row, rate = fastest(name, arithmetic(call, device, tf32), device)
    memory = e.efficiency(e.ELEMENTWISE, e.ANY, device)
    moved_s = moved_bytes(call) / (device.memory_bytes_per_s * memory.share)
    full_s = max(call_flop(call) / rate, moved_s)
    forward = Kernels(1, row.ramp_s, full_s)
    if not grads:
        return forward, NONE
    if name == e.ATTENTION:
        return forward, Kernels(2, 2 * row.ramp_s, ATTENTION_BACKWARD * row.backward * full_s)
    count = min(grads, 2)  # a bias takes a sum and no product
    return forward, Kernels(count, count * row.ramp_s, count * PER_GRADIENT[name] * row.backward * full_s)


def fastest(name: str, dtype: str, device: Device) -> tuple[e.Efficiency, float]:
    """The efficiency and the rate of a class of products. Plain fp32 if TF32 may be used but is no faster, as
    on many GeForce cards."""
    allowed = (dtype, e.F32) if dtype == e.TF32 else (dtype,)
    rows = [(e.efficiency(name, d, device), e.peak_flop_per_s(name, d, device)) for d in allowed]
    candidates = ((row, row.share * peak * device.sustained) for row, peak in rows)
    return max(candidates, key=lambda pair: pair[1])


def passed_bytes(call: Call, grads: int) -> tuple[float, float]:
    """Bytes that memory-bound kernels read and write, forward and backward."""
    name, moved = base_name(call), moved_bytes(call)
    if call.op in PASSES:
        forward, backward = PASSES[call.op]
        return forward * moved, backward * moved
    if name in LOOKUPS:
        # looked-up rows are read and written; their gradient is added to zeros of the whole table
        rows = sum(t.size_bytes for t in call.outputs)
        picked = 2 * rows + sum(t.size_bytes for t in call.inputs[1:])
        return picked, call.inputs[0].size_bytes + 3 * rows
    factor = OTHER_BACKWARD
    if name in NORMS:
        factor = NORM_BACKWARD
    elif name in SOFTMAX:
        factor = SOFTMAX_BACKWARD
    elif name in ACTIVATIONS:
        factor = ACTIVATION_BACKWARD
    elif name in COPIES:
        factor = COPY_BACKWARD
    return moved, factor * moved
