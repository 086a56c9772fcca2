"""Helpers that the kernels of our own operators share."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 2**21  # the bytes on which a CPU works at a time: they stay in its second-level cache
HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which statistics of ``x`` are computed."""
    return torch.float32 if x.dtype in HALF else x.dtype
