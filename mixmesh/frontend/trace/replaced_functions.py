"""Replaces functions of PyTorch during an export by others that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import instance_norms, scattered_writes, selected_functions
from .checked_losses import gaussian_nll_loss

STAND_INS: dict[Callable, Callable] = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    **instance_norms.STAND_INS,
    **scattered_writes.STAND_INS,
    **selected_functions.STAND_INS,
}


class ReplacedFunctions(TorchFunctionMode):
    """A context in which the functions in ``STAND_INS`` are replaced, under every name by which a model may
    have imported them."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return STAND_INS.get(func, func)(*args, **(kwargs or {}))
