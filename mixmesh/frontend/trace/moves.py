"""Export of ``module.to(...)`` inside a forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...base.patch import patched


def moves_in_place() -> AbstractContextManager[None]:
    """A context in which ``module.to(...)`` does nothing if it would change nothing: export cannot replace
    parameters."""
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        same = all(
            (dtype is None or t.dtype == dtype or not t.is_floating_point())
            and (device is None or t.device == device)
            for t in tensors
        )
        return module if same else original(module, *args, **kwargs)

    return patched(nn.Module, "to", to)
