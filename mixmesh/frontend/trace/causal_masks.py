"""Export of ``nn.Transformer`` and its stacks with masks.

Without ``is_causal`` the stacks compare their mask with a causal one, to choose a faster kernel for the same
results. During export the mask has no values to compare.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor
from torch.nn.modules import transformer

from ...base.patch import patched


def masks_as_given() -> AbstractContextManager[None]:
    """A context in which no mask is examined: it counts as causal only if ``is_causal`` says so."""

    def is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return patched(transformer, "_detect_is_causal_mask", is_causal_mask)
