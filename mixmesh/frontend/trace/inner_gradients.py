"""Gradients that a forward pass computes itself: a gradient penalty, forces as gradients of an energy.

Export sees no operators of a backward pass, and fails on its results with messages that do not help.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...base.callers import is_script
from ...base.patch import patched
from ...errors import TraceError

_FUNCTORCH = os.path.join(os.path.dirname(torch.__file__), "_functorch")  # torch.func.grad, torch.func.vjp


def no_inner_gradients() -> AbstractContextManager[None]:
    """A context in which a script's ``torch.autograd.grad`` and ``torch.func.grad`` raise TraceError."""
    grad = torch.autograd.grad

    def refused(*args: Any, **kwargs: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if not (is_script(file) or file.startswith(_FUNCTORCH)):
            return grad(*args, **kwargs)
        raise TraceError(
            "the forward pass computes gradients itself, which cannot be traced",
            expected="operators alone; their gradients are computed by loss.backward()",
            got="torch.autograd.grad, or one of torch.func.grad, jacrev and vjp",
            hint=(
                "write the derivative out, as operators of the forward pass",
                "torch.func.jvp and jacfwd are operators of the forward pass",
                "or train this model on one device, without torchrun",
            ),
        )

    return patched(torch.autograd, "grad", refused)
