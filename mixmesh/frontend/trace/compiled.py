"""``torch.compile`` around a model: the model inside is planned, and a parallel model is never compiled.

Dynamo would follow the calls of a parallel model into its collectives and autograd functions, and fail there.
The names used here are PyTorch's internal ones for functions that it must not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from torch import nn
from torch._C._dynamo import eval_frame

from ...base.callers import warn

F = TypeVar("F", bound=Callable)
DYNAMO = "torch._dynamo.eval_frame"
REASON = "a parallel model runs the program of its plan; prepare(..., compile=True) compiles its operators"


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile(model)``, or ``model`` itself."""
    return model.get_submodule("_orig_mod") if is_compiled(model) else model


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the result of ``torch.compile``."""
    return type(module).__module__ == DYNAMO and "_orig_mod" in module._modules


def never_compiled(function: F) -> F:
    """Keeps ``torch.compile`` from compiling ``function`` and all that it calls. ``torch.compiler.disable``
    does the same, but takes nearly a second to import, on every rank."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    return function


def warn_if_compiled() -> None:
    """Warns if the caller is code that ``torch.compile`` has compiled."""
    if is_within_compiled():
        warn(f"torch.compile changes nothing here: {REASON}")


def is_within_compiled() -> bool:
    """Whether the caller is code that ``torch.compile`` has compiled, or is compiling."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == DYNAMO:
            return True
        frame = frame.f_back
    return False
