"""Tells whether float32 matrix products may run in TF32 on the tensor cores of a GPU: a setting of the job's
process that neither a graph nor a program records."""

from __future__ import annotations

import torch


def tf32_now() -> bool:
    """The setting of this process, by whichever function it was made: ``allow_tf32``, ``fp32_precision``, or
    ``torch.set_float32_matmul_precision``."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
