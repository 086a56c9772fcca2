"""Replaces functions of PyTorch during an export by others that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import overrides
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...base.patch import patched
from . import counts, covariances, instance_norms, scattered_writes, selected_functions
from .checked_losses import gaussian_nll_loss

STAND_INS: dict[Callable, Callable] = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    **counts.STAND_INS,
    **covariances.STAND_INS,
    **instance_norms.STAND_INS,
    **scattered_writes.STAND_INS,
    **selected_functions.STAND_INS,
}


class ReplacedFunctions(TorchFunctionMode):
    """A context in which the functions in ``STAND_INS`` are replaced, under every name by which a model may
    have imported them."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return STAND_INS.get(func, func)(*args, **(kwargs or {}))


def weights_of_losses_kept() -> AbstractContextManager[None]:
    """A context in which ``F.l1_loss`` keeps its weight under modes of functions."""
    return patched(F, "handle_torch_function", _with_weight)


def _with_weight(func: Callable, relevant: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function by way of the modes. PyTorch 2.13 forgets the weight of ``F.l1_loss`` there."""
    if func is F.l1_loss and len(relevant) == 3 and relevant[2] is not None:
        kwargs = {"weight": relevant[2], **kwargs}
    return overrides.handle_torch_function(func, relevant, *args, **kwargs)
