"""Datasheet figures of the devices a cluster file may name.

All figures are *dense* peaks as printed by the vendor, at the reference clocks; a roofline divides them by
what a real kernel reaches. Three conventions:

- ``tflop_per_s`` is plain fp32 (PyTorch trains fp32 with TF32 off), ``half_tflop_per_s`` is fp16 with fp32
  accumulation on the tensor cores. Consumer cards are often quoted at twice that, with fp16 accumulation.
- Cards without tensor cores: the P100 has native fp16 at twice fp32. The GTX 1080 Ti has it at 1/64, which
  nobody uses: cuBLAS computes fp16 products in fp32 there, so its half figure is its fp32 figure.
- ``memory_gib`` is the nominal size; the driver, ECC and the CUDA context take their part of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CatalogueRow:
    name: str
    tflop_per_s: float
    half_tflop_per_s: float
    memory_gib: int
    memory_gbyte_per_s: float
    supports_bf16: bool
    source: str


_ROWS = (
    # name            fp32   half   GiB   GB/s  bf16   source
    ("V100-16GB",     15.7,  125.0,  16,  900, False, "NVIDIA V100 datasheet, SXM2"),
    ("V100-32GB",     15.7,  125.0,  32,  900, False, "NVIDIA V100 datasheet, SXM2"),
    ("V100S-32GB",    16.4,  130.0,  32, 1134, False, "NVIDIA V100 datasheet, V100S PCIe"),
    ("P100-12GB",      9.3,   18.7,  12,  549, False, "NVIDIA Tesla P100 PCIe datasheet, 12 GB"),
    ("P100-16GB",      9.3,   18.7,  16,  732, False, "NVIDIA Tesla P100 PCIe datasheet, 16 GB"),
    ("T4-16GB",        8.1,   65.0,  16,  320, False, "NVIDIA T4 product brief (datasheet: 300 GB/s)"),
    ("A100-40GB",     19.5,  312.0,  40, 1555, True,  "NVIDIA A100 datasheet, 40 GB"),
    ("A100-80GB",     19.5,  312.0,  80, 2039, True,  "NVIDIA A100 datasheet, 80 GB SXM"),
    ("A800-80GB",     19.5,  312.0,  80, 2039, True,  "NVIDIA A800 datasheet, 80 GB SXM"),
    ("H100-80GB",     67.0,  989.0,  80, 3350, True,  "NVIDIA H100 datasheet, SXM (half of sparse)"),
    ("H200-141GB",    67.0,  989.0, 141, 4800, True,  "NVIDIA H200 datasheet, SXM (half of sparse)"),
    ("L4-24GB",       30.3,  121.0,  24,  300, True,  "NVIDIA L4 datasheet (half of sparse)"),
    ("A10-24GB",      31.2,  125.0,  24,  600, True,  "NVIDIA A10 datasheet"),
    ("L40S-48GB",     91.6,  362.0,  48,  864, True,  "NVIDIA L40S datasheet"),
    ("RTX2080Ti-11GB", 13.4,  53.8,  11,  616, False, "NVIDIA Turing architecture whitepaper, reference"),
    ("RTX3090-24GB",  35.6,   71.0,  24,  936, True,  "NVIDIA Ampere GA102 architecture whitepaper"),
    ("RTX4090-24GB",  82.6,  165.2,  24, 1008, True,  "NVIDIA Ada architecture whitepaper"),
    ("GTX1080Ti-11GB", 11.3,  11.3,  11,  484, False, "NVIDIA GeForce GTX 1080 Ti specifications"),
    ("RTXA6000-48GB", 38.7,  154.8,  48,  768, True,  "NVIDIA RTX A6000 datasheet (half of sparse)"),
)  # fmt: skip

CATALOGUE: dict[str, CatalogueRow] = {row[0]: CatalogueRow(*row) for row in _ROWS}
