"""Shares that kernels of GPUs reach of their device's peaks, by class of operator, dtype and size.

A kernel takes its ``ramp_s`` plus the time of its work at ``share`` of the peak. So a product that would take
t seconds at the peak reaches ``share * t / (t + share * ramp_s)`` of it, half as much as a large product if t
is ``share * ramp_s``. Figures are for usual shapes in training, not the best that a library can do, and
hold for all cards. A cluster file may give a card's own (``efficiency``).

Sources, by row:

- half, tf32: alone and in their best shapes products reach 90 % of the peak on V100
  (forums.developer.nvidia.com/t/79781), 86 % on A100, 80 % on H100 and 58 % on MI300X (Bekman, "Machine
  Learning Engineering", maximum achievable matmul FLOPS); on H100, 4096^3 takes 81 % in TF32 and 79 % in
  bf16, 1024 x 1024 x 2048 32 and 35 % (OpenXLA, ``matmul_interpolator_data.h``): a ramp of 5 us. Products of
  a training are less square, and under load the clock falls: whole trainings that were measured had 50 to
  65 % in half precision.
- half, by the device's ratio of half to fp32 peak: the faster the tensor cores are beside the rest of a
  multiprocessor, which feeds them, the smaller is the share of their peak that is reached. GeForce cards
  (ratio 2 since Ampere) reach most of it, an A100 (16) little. The powers, 1/6 for products and 1/2 for
  convolutions, are from single-card trainings of BERT and ResNet-50 on eleven cards from V100 to H100
  (github.com/lambdal/deeplearning-benchmark; ``python -m benchmarks cards``).
- f32: nearly all of the peak alone, 60 to 75 % in the whole trainings that were measured. Taken in between.
- thin products: a side below a tile of the kernel, which is 64 to 256 (NVIDIA, "Matrix Multiplication
  Background User's Guide", on tile and wave quantization), as the heads of attention are. An estimate.
- convolutions: from the same trainings of ResNet-50. In fp32, Winograd's algorithm saves multiply-adds.
- depthwise convolutions have few multiply-adds a byte and no kernels for tensor cores (Qin et al.,
  "Diagonalwise Refactorization", 2018). An estimate.
- attention: FlashAttention-2 reaches 50 to 73 % on A100 (Dao, 2023, section 4.1), kernels for fp32 and older
  cards less. An estimate.
- memory: about 90 % of the datasheet's rate in plain copies (Deakin et al., "BabelStream"), less where rows
  are reduced, far less where they are looked up. An estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cluster import Device
from ..cluster.classes import (
    ANY,
    ATTENTION,
    CONVOLUTION,
    DEPTHWISE,
    ELEMENTWISE,
    F32,
    HALF,
    LOOKUP,
    PRODUCT,
    PRODUCTS,
    REDUCTION,
    TF32,
    THIN,
)

MICRO = 1e-6


@dataclass(frozen=True)
class Efficiency:
    """``share`` of the arithmetic peak, or of the memory's rate, and ``ramp_s`` for each kernel. ``backward``
    is a factor on the usual duration of the backward pass."""

    share: float
    ramp_s: float
    backward: float = 1.0


# class, dtype, share of the peak, ramp in us
ROWS = (
    (PRODUCT, F32, 0.80, 4.0), (PRODUCT, TF32, 0.65, 5.0), (PRODUCT, HALF, 0.90, 5.0),
    (THIN, F32, 0.55, 4.0), (THIN, TF32, 0.35, 5.0), (THIN, HALF, 0.30, 5.0),
    (CONVOLUTION, F32, 0.90, 6.0), (CONVOLUTION, TF32, 0.38, 8.0), (CONVOLUTION, HALF, 0.90, 8.0),
    (DEPTHWISE, F32, 0.06, 6.0), (DEPTHWISE, TF32, 0.06, 6.0), (DEPTHWISE, HALF, 0.06, 6.0),
    (ATTENTION, F32, 0.50, 8.0), (ATTENTION, TF32, 0.30, 8.0), (ATTENTION, HALF, 0.45, 8.0),
    (ELEMENTWISE, ANY, 0.85, 2.0), (REDUCTION, ANY, 0.75, 3.0), (LOOKUP, ANY, 0.50, 3.0),
)  # fmt: skip
USUAL = {(name, dtype): Efficiency(share, ramp_us * MICRO) for name, dtype, share, ramp_us in ROWS}

# Shares above that fall with the ratio of a device's half to its fp32 peak: to this power of it.
FALLS = {(PRODUCT, HALF): 1 / 6, (CONVOLUTION, HALF): 1 / 2}

# On a CPU, products reach this share of its peak in practice, and other operators its whole memory rate
CPU_EFFICIENCY = 0.5
CPU_PRODUCT, CPU_MEMORY_BOUND = Efficiency(CPU_EFFICIENCY, 0.0), Efficiency(1.0, 0.0)


def efficiency(name: str, dtype: str, device: Device) -> Efficiency:
    """The efficiency of a class of operators on a device: the device's own, from the cluster file or a
    calibration, or else the usual one."""
    for own_name, own_dtype, *figures in device.efficiency:
        if (own_name, own_dtype) == (name, dtype):
            return Efficiency(*figures)
    if device.kind == "cpu":
        return CPU_PRODUCT if name in PRODUCTS else CPU_MEMORY_BOUND
    usual, power = USUAL[name, dtype], FALLS.get((name, dtype))
    if power is None:
        return usual
    ratio = max(device.half_flop_per_s / device.flop_per_s, 1.0)
    return replace(usual, share=usual.share * ratio**-power)


def peak_flop_per_s(name: str, dtype: str, device: Device) -> float:
    """The arithmetic peak that bounds the kernels of a class. Depthwise convolutions have no kernels for
    tensor cores."""
    if name == DEPTHWISE:
        return device.flop_per_s
    peaks = {F32: device.flop_per_s, TF32: device.tf32_flop_per_s, HALF: device.half_flop_per_s}
    return peaks[dtype]
