"""Measures the speed of a device that is not in the catalogue, by products of matrices and copies of
memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...measure.profiler.meter import Meter
from ...runtime.accelerator import is_accelerator

MEASURED_S = 0.4  # seconds for each figure: several periods of a CPU quota
CPU_SIZES = {"products": 512, "copied_bytes": 2**25}
GPU_SIZES = {"products": 4096, "copied_bytes": 2**28}


@dataclass(frozen=True)
class Speed:
    """Measured rates in units per second: ``flop_per_s`` of fp32 products, ``half_flop_per_s`` of products in
    half precision, and bytes read and written."""

    flop_per_s: float
    half_flop_per_s: float
    memory_bytes_per_s: float


def measure_speed(device: torch.device) -> Speed:
    """The speed of ``device`` while all other ranks measure theirs, in wall-clock time, so that a quota or a
    shared core counts."""
    sizes = GPU_SIZES if is_accelerator(device) else CPU_SIZES
    flop = 2 * sizes["products"] ** 3
    full = run_s(product(device, torch.float32, sizes["products"]), device)
    half = full
    if is_accelerator(device):  # on a CPU half precision is no faster, or far slower
        half = run_s(product(device, torch.float16, sizes["products"]), device)
    source = torch.zeros(sizes["copied_bytes"] // 4, device=device)
    target = torch.empty_like(source)
    copied_s = run_s(lambda: target.copy_(source), device)
    return Speed(flop / full, flop / half, 2 * sizes["copied_bytes"] / copied_s)


def product(device: torch.device, dtype: torch.dtype, size: int) -> Callable[[], object]:
    """Multiplies two square matrices."""
    a = torch.randn(size, size, device=device).to(dtype)
    b, out = a.T.contiguous(), torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def run_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run of ``work`` when it runs continuously: the total over many runs, without the first
    ones, because a throttled device runs fast and then stands still."""
    clock = Meter(device, emulated=False)  # wall-clock time, even under a quota
    warm_up = [clock.once(work) for _ in range(3)]
    runs = max(3, round(MEASURED_S / max(statistics.median(warm_up), 1e-6)))
    return clock.once(lambda: [work() for _ in range(runs)]) / runs
