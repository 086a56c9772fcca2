"""``module.to(...)`` inside a forward pass, while it is exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def moves_in_place() -> Iterator[None]:
    """``module.to(...)`` of a module that is there already does nothing: export cannot swap parameters."""
    original = nn.Module.to

    def to(module: nn.Module, *args, **kwargs):
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        same = all(
            (dtype is None or t.dtype == dtype or not t.is_floating_point())
            and (device is None or t.device == device)
            for t in tensors
        )
        return module if same else original(module, *args, **kwargs)

    nn.Module.to = to
    try:
        yield
    finally:
        nn.Module.to = original
