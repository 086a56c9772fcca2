"""The random numbers of devices: the state of a device's default generator, for every kind of device.

Uses the device's own module, as ``torch.accelerator`` has no random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .accelerator import accelerator_type, is_accelerator


def drawing_device() -> torch.device | None:
    """The accelerator on which this process draws numbers, with its index. None if it has none or has not yet
    used it: asking for its state would initialise it."""
    kind = accelerator_type()
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return None
    return torch.device(kind, torch.accelerator.current_device_index())


def generator_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device, a tensor of bytes on the CPU."""
    if not is_accelerator(device):
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Restores a state from ``generator_state`` of a device of the same type."""
    if not is_accelerator(device):
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """A context in which the CPU and the device draw from ``seed``. Afterwards they continue as if nothing
    had been drawn."""
    others = [device] if is_accelerator(device) else []
    with torch.random.fork_rng(others, device_type=device.type if others else "cuda"):
        torch.manual_seed(seed)
        yield
