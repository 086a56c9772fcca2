"""Sets PyTorch's settings of the whole process aside while a policy computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_settings() -> Iterator[None]:
    """A context in which new tensors are float32 on the CPU and gradients are recorded, whatever the caller
    has set: a policy must choose the same in a script that trains in float64, on a default device, or plans
    under no_grad."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
