"""Datasheet figures of the devices a cluster file may name.

All figures are *dense* peaks as printed by the vendor, at the reference clocks; a roofline multiplies them by
what a real kernel reaches (``mixmesh.cost.efficiency``). Four conventions:

- ``tflop_per_s`` is plain fp32, ``half_tflop_per_s`` is fp16 with fp32 accumulation on the tensor cores.
  Consumer cards are often quoted at twice that, with fp16 accumulation.
- ``tf32_tflop_per_s`` is fp32 on the tensor cores (Ampere and later), 0 where there is none.
- Cards without tensor cores: the P100 has native fp16 at twice fp32. The GTX 1080 Ti has it at 1/64, which
  nobody uses: cuBLAS computes fp16 products in fp32 there, so its half figure is its fp32 figure.
- ``memory_gib`` is the nominal size; the driver, ECC and the CUDA context take their part of it.
"""

from __future__ import annotations

import re
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

    @property
    def tf32_tflop_per_s(self) -> float:
        """The TF32 peak, from the same document as the other figures; 0 for cards without TF32."""
        if self.name in TF32_TFLOP_PER_S:
            return TF32_TFLOP_PER_S[self.name]
        return self.tflop_per_s if self.name.startswith(("RTX30", "RTX40", "RTX50")) else 0.0

    @property
    def sustained(self) -> float:
        """The share of the arithmetic peaks that the card's power limit allows under load."""
        return SUSTAINED[self.name][0] if self.name in SUSTAINED else 1.0


_ROWS = (
    # name            fp32   half   GiB   GB/s  bf16   source
    ("V100-16GB",     15.7,  125.0,  16,  900, False, "NVIDIA V100 datasheet, SXM2"),
    ("V100-32GB",     15.7,  125.0,  32,  900, False, "NVIDIA V100 datasheet, SXM2"),
    ("V100S-32GB",    16.4,  130.0,  32, 1134, False, "NVIDIA V100 datasheet, V100S PCIe"),
    ("V100PCIE-16GB", 14.0,  112.0,  16,  900, False, "NVIDIA V100 datasheet, PCIe"),
    ("V100PCIE-32GB", 14.0,  112.0,  32,  900, False, "NVIDIA V100 datasheet, PCIe"),
    ("TITANV-12GB",   14.9,  110.0,  12,  653, False, "NVIDIA TITAN V specifications"),
    ("K80-12GB",       4.4,    4.4,  12,  240, False, "NVIDIA Tesla K80 datasheet, one of its two dies"),
    ("M40-12GB",       7.0,    7.0,  12,  288, False, "NVIDIA Tesla M40 datasheet"),
    ("M40-24GB",       7.0,    7.0,  24,  288, False, "NVIDIA Tesla M40 24 GB datasheet"),
    ("P4-8GB",         5.5,    5.5,   8,  192, False, "NVIDIA Tesla P4 datasheet"),
    ("P40-24GB",      12.0,   12.0,  24,  346, False, "NVIDIA Tesla P40 datasheet"),
    ("P100SXM2-16GB", 10.6,   21.2,  16,  732, False, "NVIDIA Tesla P100 datasheet, SXM2"),
    ("P100-12GB",      9.3,   18.7,  12,  549, False, "NVIDIA Tesla P100 PCIe datasheet, 12 GB"),
    ("P100-16GB",      9.3,   18.7,  16,  732, False, "NVIDIA Tesla P100 PCIe datasheet, 16 GB"),
    ("T4-16GB",        8.1,   65.0,  16,  320, False, "NVIDIA T4 product brief (datasheet: 300 GB/s)"),
    ("A100-40GB",     19.5,  312.0,  40, 1555, True,  "NVIDIA A100 datasheet, 40 GB"),
    ("A100-80GB",     19.5,  312.0,  80, 2039, True,  "NVIDIA A100 datasheet, 80 GB SXM"),
    ("A100PCIE-80GB", 19.5,  312.0,  80, 1935, True,  "NVIDIA A100 datasheet, 80 GB PCIe"),
    ("A800-80GB",     19.5,  312.0,  80, 2039, True,  "NVIDIA A800 datasheet, 80 GB SXM"),
    ("H100-80GB",     67.0,  989.0,  80, 3350, True,  "NVIDIA H100 datasheet, SXM (half of sparse)"),
    ("H100PCIe-80GB", 51.0, 756.0,  80, 2000, True,  "NVIDIA H100 datasheet, PCIe (half of sparse)"),
    ("GH200-96GB",    67.0,  989.0,  96, 4000, True,  "NVIDIA GH200 datasheet, 96 GB HBM3"),
    ("H200-141GB",    67.0,  989.0, 141, 4800, True,  "NVIDIA H200 datasheet, SXM (half of sparse)"),
    ("B200-180GB",    80.0, 2250.0, 180, 8000, True,  "NVIDIA DGX B200 datasheet (half of sparse)"),
    ("L4-24GB",       30.3,  121.0,  24,  300, True,  "NVIDIA L4 datasheet (half of sparse)"),
    ("A2-16GB",        4.5,   18.0,  16,  200, True,  "NVIDIA A2 datasheet (half of sparse)"),
    ("A10G-24GB",     35.0,   70.0,  24,  600, True,  "NVIDIA A10G datasheet (half of sparse)"),
    ("A10-24GB",      31.2,  125.0,  24,  600, True,  "NVIDIA A10 datasheet"),
    ("L40S-48GB",     91.6,  362.0,  48,  864, True,  "NVIDIA L40S datasheet"),
    ("GTX1060-6GB",    4.4,    4.4,   6,  192, False, "NVIDIA GeForce GTX 1060 specifications"),
    ("GTX1070-8GB",    6.5,    6.5,   8,  256, False, "NVIDIA GeForce GTX 1070 specifications"),
    ("GTX1070Ti-8GB",  8.2,    8.2,   8,  256, False, "NVIDIA GeForce GTX 1070 Ti specifications"),
    ("GTX1080-8GB",    8.9,    8.9,   8,  320, False, "NVIDIA GeForce GTX 1080 whitepaper"),
    ("GTX1080Ti-11GB", 11.3,  11.3,  11,  484, False, "NVIDIA GeForce GTX 1080 Ti specifications"),
    ("TITANXp-12GB",  12.1,   12.1,  12,  548, False, "NVIDIA TITAN Xp specifications"),
    ("GTX1660-6GB",    5.0,   10.1,   6,  192, False, "NVIDIA GeForce GTX 1660 specifications"),
    ("GTX1660SUPER-6GB", 5.0, 10.1,   6,  336, False, "NVIDIA GeForce GTX 1660 SUPER specifications"),
    ("GTX1660Ti-6GB",  5.4,   10.9,   6,  288, False, "NVIDIA GeForce GTX 1660 Ti specifications"),
    ("RTX2060-6GB",    6.5,   25.8,   6,  336, False, "NVIDIA Turing architecture whitepaper, reference"),
    ("RTX2060SUPER-8GB", 7.2, 28.7,   8,  448, False, "NVIDIA GeForce RTX 2060 SUPER specifications"),
    ("RTX2070-8GB",    7.5,   29.9,   8,  448, False, "NVIDIA Turing architecture whitepaper, reference"),
    ("RTX2070SUPER-8GB", 9.1, 36.3,   8,  448, False, "NVIDIA GeForce RTX 2070 SUPER specifications"),
    ("RTX2080-8GB",   10.1,   40.3,   8,  448, False, "NVIDIA Turing architecture whitepaper, reference"),
    ("RTX2080SUPER-8GB", 11.2, 44.6,  8,  496, False, "NVIDIA GeForce RTX 2080 SUPER specifications"),
    ("RTX2080Ti-11GB", 13.4,  53.8,  11,  616, False, "NVIDIA Turing architecture whitepaper, reference"),
    ("TITANRTX-24GB", 16.3,  130.5,  24,  672, False, "NVIDIA TITAN RTX specifications"),
    ("QUADRORTX4000-8GB", 7.1, 57.0,  8,  416, False, "NVIDIA Quadro RTX 4000 datasheet"),
    ("QUADRORTX5000-16GB", 11.2, 89.2, 16, 448, False, "NVIDIA Quadro RTX 5000 datasheet"),
    ("QUADRORTX6000-24GB", 16.3, 130.5, 24, 672, False, "NVIDIA Quadro RTX 6000 datasheet"),
    ("QUADRORTX8000-48GB", 16.3, 130.5, 48, 672, False, "NVIDIA Quadro RTX 8000 datasheet"),
    ("RTX3050-8GB",    9.1,   18.2,   8,  224, True,  "NVIDIA GeForce RTX 3050 specifications, 8 GB"),
    ("RTX3060-12GB",  12.7,   25.5,  12,  360, True,  "NVIDIA GeForce RTX 3060 specifications"),
    ("RTX3060Ti-8GB", 16.2,   32.4,   8,  448, True,  "NVIDIA GeForce RTX 3060 Ti specifications"),
    ("RTX3070-8GB",   20.3,   40.6,   8,  448, True,  "NVIDIA Ampere GA102 architecture whitepaper"),
    ("RTX3070Ti-8GB", 21.7,   43.5,   8,  608, True,  "NVIDIA GeForce RTX 3070 Ti specifications"),
    ("RTX3080-10GB",  29.8,   59.5,  10,  760, True,  "NVIDIA Ampere GA102 architecture whitepaper"),
    ("RTX3080-12GB",  30.6,   61.3,  12,  912, True,  "NVIDIA GeForce RTX 3080 12 GB specifications"),
    ("RTX3080Ti-12GB", 34.1,  68.2,  12,  912, True,  "NVIDIA GeForce RTX 3080 Ti specifications"),
    ("RTX3090-24GB",  35.6,   71.0,  24,  936, True,  "NVIDIA Ampere GA102 architecture whitepaper"),
    ("RTX3090Ti-24GB", 40.0,  80.0,  24, 1008, True,  "NVIDIA GeForce RTX 3090 Ti specifications"),
    ("RTX4060-8GB",   15.1,   30.2,   8,  272, True,  "NVIDIA GeForce RTX 4060 specifications"),
    ("RTX4060Ti-8GB", 22.1,   44.1,   8,  288, True,  "NVIDIA GeForce RTX 4060 Ti specifications"),
    ("RTX4060Ti-16GB", 22.1,  44.1,  16,  288, True,  "NVIDIA GeForce RTX 4060 Ti specifications"),
    ("RTX4070-12GB",  29.1,   58.3,  12,  504, True,  "NVIDIA GeForce RTX 4070 specifications"),
    ("RTX4070SUPER-12GB", 35.5, 71.0, 12, 504, True,  "NVIDIA GeForce RTX 4070 SUPER specifications"),
    ("RTX4070Ti-12GB", 40.1,  80.2,  12,  504, True,  "NVIDIA GeForce RTX 4070 Ti specifications"),
    ("RTX4070TiSUPER-16GB", 44.1, 88.2, 16, 672, True, "NVIDIA GeForce RTX 4070 Ti SUPER specifications"),
    ("RTX4080-16GB",  48.7,   97.5,  16,  717, True,  "NVIDIA Ada architecture whitepaper"),
    ("RTX4080SUPER-16GB", 52.2, 104.4, 16, 736, True, "NVIDIA GeForce RTX 4080 SUPER specifications"),
    ("RTX4090-24GB",  82.6,  165.2,  24, 1008, True,  "NVIDIA Ada architecture whitepaper"),
    ("RTX5060-8GB",   19.2,   38.4,   8,  448, True,  "NVIDIA GeForce RTX 5060 specifications"),
    ("RTX5060Ti-8GB", 23.7,   47.4,   8,  448, True,  "NVIDIA GeForce RTX 5060 Ti specifications"),
    ("RTX5060Ti-16GB", 23.7,  47.4,  16,  448, True,  "NVIDIA GeForce RTX 5060 Ti specifications"),
    ("RTX5070-12GB",  30.9,   61.7,  12,  672, True,  "NVIDIA RTX Blackwell architecture whitepaper"),
    ("RTX5070Ti-16GB", 43.9,  87.9,  16,  896, True,  "NVIDIA RTX Blackwell architecture whitepaper"),
    ("RTX5080-16GB",  56.3,  112.6,  16,  960, True,  "NVIDIA RTX Blackwell architecture whitepaper"),
    ("RTX5090-32GB", 104.8,  209.5,  32, 1792, True,  "NVIDIA RTX Blackwell architecture whitepaper"),
    ("A30-24GB",      10.3,  165.0,  24,  933, True,  "NVIDIA A30 datasheet"),
    ("A40-48GB",      37.4,  149.7,  48,  696, True,  "NVIDIA A40 datasheet"),
    ("L40-48GB",      90.5,  181.0,  48,  864, True,  "NVIDIA L40 datasheet"),
    ("RTXA2000-12GB",  8.0,   31.9,  12,  288, True,  "NVIDIA RTX A2000 datasheet (half of sparse)"),
    ("RTXA4000-16GB", 19.2,   76.7,  16,  448, True,  "NVIDIA RTX A4000 datasheet (half of sparse)"),
    ("RTXA4500-20GB", 23.7,   94.6,  20,  640, True,  "NVIDIA RTX A4500 datasheet (half of sparse)"),
    ("RTXA5000-24GB", 27.8,  111.1,  24,  768, True,  "NVIDIA RTX A5000 datasheet (half of sparse)"),
    ("RTXA6000-48GB", 38.7,  154.8,  48,  768, True,  "NVIDIA RTX A6000 datasheet (half of sparse)"),
    ("RTX4000Ada-20GB", 26.7, 106.8, 20,  360, True,  "NVIDIA RTX 4000 Ada datasheet (half of sparse)"),
    ("RTX5000Ada-32GB", 65.3, 261.1, 32,  576, True,  "NVIDIA RTX 5000 Ada datasheet (half of sparse)"),
    ("RTX6000Ada-48GB", 91.1, 364.2, 48,  960, True,  "NVIDIA RTX 6000 Ada datasheet (half of sparse)"),
    ("RX7900XT-20GB", 51.6,  103.2,  20,  800, True,  "AMD Radeon RX 7900 XT specifications"),
    ("RX7900XTX-24GB", 61.4, 122.8,  24,  960, True,  "AMD Radeon RX 7900 XTX specifications"),
    ("MI100-32GB",    23.1,  184.6,  32, 1229, True,  "AMD Instinct MI100 datasheet"),
    ("MI210-64GB",    22.6,  181.0,  64, 1638, True,  "AMD Instinct MI210 datasheet, fp32 vector"),
    ("MI250X-64GB",   23.9,  191.5,  64, 1638, True,  "AMD Instinct MI250X datasheet, one of its two dies"),
    ("MI300X-192GB", 163.4, 1307.4, 192, 5325, True,  "AMD Instinct MI300X datasheet"),
)  # fmt: skip

CATALOGUE: dict[str, CatalogueRow] = {row[0]: CatalogueRow(*row) for row in _ROWS}

# Dense peaks of TF32 of cards for data centres and workstations. On GeForce cards TF32 is no faster than
# plain fp32 (NVIDIA's whitepapers of GA102, Ada and RTX Blackwell), so they have the figure of their row.
TF32_TFLOP_PER_S = {
    "A100-40GB": 156.0, "A100-80GB": 156.0, "A800-80GB": 156.0, "H100-80GB": 494.7, "H100PCIe-80GB": 378.0,
    "GH200-96GB": 494.7, "H200-141GB": 494.7, "L4-24GB": 60.5, "A10-24GB": 62.5, "L40S-48GB": 183.0,
    "A100PCIE-80GB": 156.0, "B200-180GB": 1125.0, "A2-16GB": 9.0, "A10G-24GB": 35.0, "RTXA2000-12GB": 15.9,
    "RTXA4500-20GB": 47.3, "RTX4000Ada-20GB": 53.4, "RTX5000Ada-32GB": 130.6,
    "A30-24GB": 82.0, "A40-48GB": 74.8, "L40-48GB": 90.5, "RTXA4000-16GB": 38.3, "RTXA5000-24GB": 55.6,
    "RTXA6000-48GB": 77.4, "RTX6000Ada-48GB": 182.1, "MI300X-192GB": 653.7,
}  # fmt: skip

# Cards whose power limit keeps them far below their boost clock under load: share of the peaks, and source.
# Others reach their clock, or nearly; a GeForce card often passes it.
SUSTAINED: dict[str, tuple[float, str]] = {
    "T4-16GB": (0.6, "70 W: cuBLAS reaches 24 of 65 TFLOP/s in fp16 (forums.developer.nvidia.com/t/264462); "
                "throttling: Jia et al., Dissecting the NVidia Turing T4 GPU via Microbenchmarking, 2019"),
    "L4-24GB": (0.65, "72 W, base clock 795 and boost clock 2040 MHz (NVIDIA L4 product brief): a guess"),
    "A10-24GB": (0.7, "150 W, base clock 885 and boost clock 1695 MHz (NVIDIA A10 product brief): a guess"),
}  # fmt: skip

# words of a reported name that do not tell cards apart: makers, and what a GH200 has beside its GPU
_MAKERS = {"NVIDIA", "TESLA", "GEFORCE", "AMD", "INSTINCT", "RADEON", "GENERATION", "480GB"}
_SIZE = re.compile(r"HBM\w*|(\d+)GB")
_SPELT_SIZE = re.compile(r"(?<![A-Z\d.])(\d+)\s*G(?:I?B)?\b")  # "24 GB", "24GiB" and "24G"
# a form distinguishes cards only if the catalogue has a row for it
_FORM = re.compile(r"SXM\d?|PCIE|OAM|DGXS")
NUMBER_OF_CARDS = re.compile(r"(\d+)X|X(\d+)")  # "2x" before a name, or "x2" behind it
# reported and nominal sizes differ by ECC and by the driver's own memory
_MEMORY_TOLERANCE = 0.12


def catalogue_row(reported_name: str, memory_bytes: int) -> CatalogueRow | None:
    """The row of the card that PyTorch reports as ``reported_name`` (``torch.cuda.get_device_name()``) with
    ``memory_bytes`` of memory. None if no row matches both: a laptop's chip may share the name of a desktop
    card."""
    memory_gib = memory_bytes / 2**30
    for rows in _rows_by_form(_words(reported_name)):
        near = [row for row in rows if abs(memory_gib / row.memory_gib - 1) <= _MEMORY_TOLERANCE]
        if near:
            return min(near, key=lambda row: abs(memory_gib - row.memory_gib))
    return None


def rows_named(name: str) -> tuple[CatalogueRow, ...]:
    """The rows that a name may mean: the row of that name, or all rows of cards that people or PyTorch call
    so ("RTX 4090", "NVIDIA GeForce RTX 4090"), which may have several sizes of memory."""
    if name in CATALOGUE:
        return (CATALOGUE[name],)
    words = _words(name)
    sizes = {int(size[1]) for w in words if (size := _SIZE.fullmatch(w)) and size[1]}
    for rows in _rows_by_form(words):
        meant = tuple(row for row in rows if not sizes or row.memory_gib in sizes)
        if meant:
            return meant
    return ()


def rows_ending_in(name: str) -> tuple[CatalogueRow, ...]:
    """The rows of cards whose names end in ``name``, which leaves out how they begin: "A6000", "3090 Ti"."""
    end = "".join(w for w in _words(name) if not _SIZE.fullmatch(w))
    has_number = any(c.isdigit() for c in end)
    return tuple(row for row in CATALOGUE.values() if has_number and _model(row).endswith(end))


def _words(reported_name: str) -> list[str]:
    """The words of a name without those of its maker."""
    return [word for word in _split(reported_name) if word not in _MAKERS]


def _split(name: str) -> list[str]:
    plain = _SPELT_SIZE.sub(r"\1GB", name.upper())
    return [word for word in re.split(r"[\s\-_(),®™]+", plain) if word]


def _model(row: CatalogueRow) -> str:
    """The row's name without its size of memory."""
    return row.name.rpartition("-")[0].upper()


def _rows_by_form(words: list[str]) -> list[list[CatalogueRow]]:
    """The rows of a name, with all sizes of memory: first those of the form (SXM, PCIe) in the name, then
    those of any form."""
    model = [w for w in words if not _SIZE.fullmatch(w)]
    plain = [w for w in model if not _FORM.fullmatch(w)]
    return [[row for row in CATALOGUE.values() if _model(row) == "".join(named)] for named in (model, plain)]
