"""``torch.autocast`` around a model's call: its casts are traced and planned with the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from .dtypes import DTYPE_NAME, TORCH_DTYPE

Autocast = tuple[str, str]  # (type of device, name of a dtype), such as ("cuda", "bf16")
# types of devices whose contexts are examined, even ones for which this PyTorch has no kernels
DEVICES = tuple(
    dict.fromkeys(("cpu", "cuda", getattr(torch.accelerator.current_accelerator(), "type", "cpu")))
)


def autocast_now(device: str) -> Autocast | None:
    """The context that is in effect for a type of device, or None."""
    if not torch.is_autocast_enabled(device):
        return None
    return device, DTYPE_NAME[torch.get_autocast_dtype(device)]


def device_of(model: nn.Module, default: str = "cpu") -> str:
    """The type of device that a model is on, or ``default`` if it has no values."""
    tensors = (*model.parameters(), *model.buffers())
    return next((x.device.type for x in tensors if x.device.type != "meta"), default)


def autocast_for(model: nn.Module, wanted: Any = None) -> Autocast | None:
    """The context that a model is traced under, or None.

    ``wanted`` is a ``torch.autocast``, a dtype for the model's device, or None for the context that is in
    effect. False stands for no context, and so does an empty one (``nullcontext()`` or ``suppress()``, which
    some scripts use). Raises InputError for the context of another type of device, whose casts differ.
    """
    device = device_of(model)
    if wanted is None:
        return autocast_now(device)
    if wanted is False or isinstance(wanted, nullcontext | suppress):
        return None
    if isinstance(wanted, torch.dtype) and wanted in DTYPE_NAME:
        return device, DTYPE_NAME[wanted]
    if not isinstance(wanted, torch.autocast):
        raise InputError(
            "autocast= does not say what to cast to",
            expected="torch.autocast(device, dtype), or a dtype",
            got=repr(wanted),
            hint="autocast=torch.bfloat16",
        )
    if wanted.device != device:
        raise _casts_nothing(wanted.device, device, "before it is planned")
    return (device, DTYPE_NAME[wanted.fast_dtype]) if wanted._enabled else None


def check_casts(model: nn.Module, planned: Autocast | None) -> None:
    """Raises InputError if the context that a model was planned under casts nothing where the model is now:
    its forward pass could not be compared with the plan's."""
    device = device_of(model, "meta")
    if planned is not None and device not in ("meta", planned[0]):
        raise _casts_nothing(planned[0], device, "before it is handed over")


def _casts_nothing(context: str, device: str, when: str) -> InputError:
    return InputError(
        f"autocast on {context} casts nothing of a model on {device}",
        expected=f"a model on {context}",
        got=f"one on {device}",
        hint=f"model.to({context!r}) {when}",
    )


def under(autocast: Autocast | None, *, keeps_casts: bool | None = None) -> Any:
    """Makes the context; an empty one for None. ``keeps_casts``: whether parameters are cast once in it, and
    not for each use; None leaves that to PyTorch, which does not while it exports."""
    if autocast is None:
        return nullcontext()
    device, dtype = autocast
    return torch.autocast(device, TORCH_DTYPE[dtype], cache_enabled=keeps_casts)


@contextmanager
def no_autocast() -> Iterator[None]:
    """A context in which nothing is cast, even inside a context of the caller's."""
    with ExitStack() as stack:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def autocast_text(autocast: Autocast | None) -> str:
    """The code of an expression that makes a context."""
    if autocast is None:
        return "no autocast"
    device, dtype = autocast
    return f"torch.autocast({device!r}, {TORCH_DTYPE[dtype]})"
