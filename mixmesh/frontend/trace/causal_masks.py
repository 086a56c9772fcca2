"""Masks that are handed to ``nn.Transformer`` and its stacks, while a model is exported.

Without ``is_causal`` the stacks compare the mask that they are given with a causal one, to choose a faster
kernel for the same results. Its values are not there while a model is exported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.modules import transformer


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Within it attention uses every mask as it is given, and none is read."""
    original = transformer._detect_is_causal_mask

    def is_said_to_be_causal(
        mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
    ) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = is_said_to_be_causal
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original
