"""The parts that the kernels of our own operators share."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 2**21  # the bytes that a CPU works on at a time: they stay in its second-level cache
HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> torch.dtype:
    """The dtype that statistics of ``x`` are computed in."""
    return torch.float32 if x.dtype in HALF else x.dtype
