"""Copies many small tensors at a time: on a GPU each separate copy would cost a launch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors with the same values."""
    copies = {name: torch.empty_like(x) for name, x in tensors.items()}
    copy_all([*copies.values()], [*tensors.values()])
    return copies


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into the target at its place."""
    if targets:
        torch._foreach_copy_(targets, sources)
