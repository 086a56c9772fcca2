"""``torch.compile`` around a model: the model itself is planned, and a parallel model is never compiled.

Dynamo would follow the calls of a parallel model into its collectives and its autograd functions, and fail
there. The names used here are PyTorch's own for functions that it leaves alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch._C._dynamo import eval_frame

from ...base.callers import warn

F = TypeVar("F", bound=Callable)
DYNAMO = "torch._dynamo.eval_frame"
REASON = "a parallel model runs the program of its plan; prepare(..., compile=True) compiles its operators"


def uncompiled(model: nn.Module) -> nn.Module:
    """The model within ``torch.compile(model)``; any other itself."""
    return model._modules["_orig_mod"] if is_compiled(model) else model


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` makes of another."""
    return type(module).__module__ == DYNAMO and "_orig_mod" in module._modules


def never_compiled(function: F) -> F:
    """``function``, which runs as it is within code that ``torch.compile`` compiles, with all that it calls.
    ``torch.compiler.disable`` does the same, and takes nearly a second to be imported on every rank."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, REASON
    return function


def warn_if_compiled() -> None:
    """Warns where the caller is within code that ``torch.compile`` has compiled."""
    if is_within_compiled():
        warn(f"torch.compile changes nothing here: {REASON}")


def is_within_compiled() -> bool:
    """Whether this is called by code that ``torch.compile`` has compiled, or while it compiles some."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == DYNAMO:
            return True
        frame = frame.f_back
    return False
