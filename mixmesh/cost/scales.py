"""Scales for the estimates of operators that a profile lacks: measured over estimated seconds of their class,
and the host's time to issue an operator.

The seconds of a measured operator over its share are a line: its slope is the work, its constant the fixed
time.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator

from ..cluster import Device
from . import efficiency as e
from .kernels import ATTENTION, CONVOLUTIONS, THIN_BELOW, fastest
from .profile import DeviceProfile, OpMeasurement
from .work import HALF, VIEWS

FIRST_DTYPE = re.compile(r"\((\w+)\[")
SHAPE = re.compile(r"\[(\d+(?:, \d+)+)\]")


def slope(measured: DeviceProfile, device: Device, *, product: bool, tf32: bool) -> float | None:
    """The median of measured over estimated seconds, for the work of products or of the other operators. None
    if none was measured."""
    ratios = []
    for key, op in measured.ops.items():
        estimate_s = work_s(key, op, device, tf32)
        if (op.flop > 0) == product and estimate_s > 0:
            ratios.append(op.forward.affine[1] * measured.step_scale / estimate_s)
    return statistics.median(ratios) if ratios else None


def work_s(key: str, op: OpMeasurement, device: Device, tf32: bool) -> float:
    """The estimated seconds of a measured operator's work, from its name, floating point operations and bytes
    in the profile."""
    if device.kind == "cpu" and not device.efficiency:
        return cpu_work_s(op.flop, op.moved_bytes, device, half=False)
    moved_s = op.moved_bytes / (device.memory_bytes_per_s * e.efficiency(e.ELEMENTWISE, e.ANY, device).share)
    if not op.flop:
        return moved_s
    _, rate = fastest(class_of_key(key, op.flop), dtype_of_key(key, device, tf32), device)
    return max(op.flop / rate, moved_s)


def cpu_work_s(flop: int, moved: float, device: Device, *, half: bool) -> float:
    """Seconds that ``flop`` operations and ``moved`` bytes take on a CPU."""
    rate = device.half_flop_per_s if half and device.half_flop_per_s else device.flop_per_s
    return max(flop / (rate * e.CPU_EFFICIENCY), moved / device.memory_bytes_per_s)


def class_of_key(key: str, flop: int) -> str:
    """The class of a measured product (``kernels.class_of``), by the shapes in its name: its factors are the
    last two inputs of two dims or more, and every dim that the second lacks counts as rows."""
    name = key.partition("(")[0]
    if name == ATTENTION:
        return e.ATTENTION
    shapes = [tuple(map(int, dims.split(","))) for dims in SHAPE.findall(key.partition(";")[0])]
    if name.startswith(CONVOLUTIONS):
        return e.DEPTHWISE if len(shapes) > 1 and shapes[1][1] == 1 < shapes[0][1] else e.CONVOLUTION
    if not shapes:
        return e.THIN
    rows = flop / max(2 * math.prod(shapes[-1]), 1)
    return e.PRODUCT if min(rows, *shapes[-1][-2:]) >= THIN_BELOW else e.THIN


def dtype_of_key(key: str, device: Device, tf32: bool) -> str:
    first = FIRST_DTYPE.search(key)
    if first is not None and first[1] in HALF:
        return e.HALF
    may = tf32 or key.startswith(CONVOLUTIONS)
    return e.TF32 if may and device.tf32_flop_per_s else e.F32


def issue_s(measured: DeviceProfile, usual_s: float) -> float:
    """Seconds that the host takes to issue an operator: the median constant of operators whose time is mostly
    constant (``usual_s`` if there are none), and at most the time of the shortest operator."""
    lines = [op.forward.affine for op in real_kernels(measured)]
    constants = [constant for constant, work in lines if constant >= work]
    shortest_s = min((op.forward.rising[0][1] for op in real_kernels(measured)), default=usual_s)
    issue = statistics.median(constants) if constants else usual_s
    return min(issue, shortest_s) * measured.step_scale


def real_kernels(measured: DeviceProfile) -> Iterator[OpMeasurement]:
    """The measured operators that are not views."""
    return (op for key, op in measured.ops.items() if key.partition("(")[0] not in VIEWS)
