"""Lower bounds of kernels' seconds from a device's own figures: its full arithmetic peak, its full memory
rate, and no time to issue or start kernels.

The cost model (``model``) plans with usual shares of these peaks, which would not give a lower bound.
"""

from __future__ import annotations

import math

from ..cluster import Device
from ..lang.optimizer_states import OptimizerStates
from ..lang.rules import Call
from .efficiency import F32, HALF, TF32
from .kernels import arithmetic
from .work import call_flop, moved_bytes

CONVOLUTIONS = "aten.conv"
WINOGRAD = 4.0  # F(4x4, 3x3), which cuDNN has for fp32 and fp16, needs 4 times fewer multiplications


def peak_op_s(call: Call, grads: int, device: Device, *, tf32: bool = False) -> float:
    """Seconds of the whole call, forward and backward, at the peaks. ``grads`` is the number of its inputs
    that take a gradient: a product is repeated for at most two of them, as a bias takes a sum. Memory-bound
    operators count nothing: a compiler may fuse them into a product that reads or writes the same tensor.
    ``tf32``: whether the job allows TF32 in matrix products."""
    flop = least_flop(call)
    if not flop:
        return 0.0
    least_s = max(flop / peak_flop_per_s(call, device, tf32), moved_bytes(call) / device.memory_bytes_per_s)
    return least_s * (1 + min(grads, 2))


def least_flop(call: Call) -> float:
    """Floating point operations of the whole call with the best algorithm in use; for a convolution over
    windows that is Winograd's (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016)."""
    has_windows = call.op.startswith(CONVOLUTIONS) and math.prod(call.inputs[1].shape[2:]) > 1
    return call_flop(call) / (WINOGRAD if has_windows else 1)


def peak_flop_per_s(call: Call, device: Device, tf32: bool) -> float:
    """The device's fastest arithmetic for the dtype of the call, on tensor cores if allowed."""
    peaks = {F32: 0.0, TF32: device.tf32_flop_per_s, HALF: device.half_flop_per_s}
    return max(device.flop_per_s, peaks[arithmetic(call, device, tf32)])


def peak_optimizer_s(states: OptimizerStates, size_bytes: float, device: Device) -> float:
    """Seconds of a fused step: parameter and kept states are read and written, the gradient is read."""
    return (3 + 2 * states.kept) * size_bytes / device.memory_bytes_per_s
