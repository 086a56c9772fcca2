"""Measures how long a device takes to join gradients into one buffer, which are then summed together.

A C library may map large buffers from the kernel each time, whose pages are new: joining 8 MiB then takes
three times as long for each byte as joining half of that.
"""

from __future__ import annotations

import statistics
import time

import torch

from ...base.heap import OWN_PIECE_BYTES
from ...runtime.allocator import give_back
from .limit import OPERATORS, Limit

LARGEST_BYTES = 2 * OWN_PIECE_BYTES
# the largest first: what smaller buffers leave in the heap would serve the next larger one
SIZES_BYTES = (LARGEST_BYTES, OWN_PIECE_BYTES, OWN_PIECE_BYTES - 2**16, OWN_PIECE_BYTES // 2, 2**16)
PIECES = 16  # gradients in a buffer
REPEATS = 3


def measure_joins(device: torch.device, limit: Limit | None = None) -> tuple[tuple[float, float], ...]:
    """``DeviceProfile.join_s``: seconds of the computing thread by size in bytes. Nothing is measured if
    ``limit`` leaves no time for operators either. Collective."""
    if limit is not None and limit.is_past(OPERATORS):
        return ()
    pieces = [torch.zeros(LARGEST_BYTES // 4 // PIECES, device=device) for _ in range(PIECES)]
    give_back()
    clock = time.thread_time if device.type == "cpu" else time.perf_counter

    def once(size_bytes: int) -> float:
        gradients = [piece[: size_bytes // 4 // PIECES] for piece in pieces]
        started = clock()
        torch.cat(gradients).split([g.numel() for g in gradients])
        return clock() - started

    measured = [(float(size), statistics.median(once(size) for _ in range(REPEATS))) for size in SIZES_BYTES]
    return tuple(sorted(measured))
