"""Helpers that the kernels of our own operators share."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 2**21  # worked on at a time on a CPU: it stays in the second-level cache
HALF = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> torch.dtype:
    """The dtype that statistics of ``x`` are computed in."""
    return torch.float32 if x.dtype in HALF else x.dtype
