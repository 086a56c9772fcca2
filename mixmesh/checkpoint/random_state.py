"""The random numbers of a rank (of torch, Python, numpy and the device), and how many its model has drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..runtime.accelerator import is_accelerator
from ..runtime.device_random import drawing_device, generator_state, set_generator_state
from ..runtime.parallel_model import ParallelModel
from ..training.preparation.resuming import numbers_of_process, set_numbers_of_process
from .manifest import Manifest
from .values import decode, encode

BEFORE = "cuda"  # the key of the device's numbers in checkpoints that were written when only CUDA's were kept


def random_state(model: nn.Module) -> Any:
    """The encoded states of this rank's random numbers. The device's state is stored with its type, as it is
    useless for another type."""
    device = device_of(model)
    numbers = {
        "process": numbers_of_process(),
        "device": None if device is None else (device.type, generator_state(device)),
        "passes": model._runtime.random.step if isinstance(model, ParallelModel) else 0,
    }
    return encode(numbers, "the state of random numbers")


def device_of(model: nn.Module) -> torch.device | None:
    """The accelerator on which a rank draws random numbers: that of its parallel model, or else the process's
    own; None for a CPU, whose numbers are the process's."""
    device = model.comm.device if isinstance(model, ParallelModel) else drawing_device()
    return device if device is not None and is_accelerator(device) else None


def restore_random_state(model: nn.Module, manifest: Manifest, rank: int, world_size: int) -> None:
    """Restores the random state that the saving run had on this rank. If the number of ranks has changed,
    every rank takes the first rank's state."""
    same_ranks = manifest.world_size == world_size
    kept = manifest.random.get(str(rank), manifest.random["0"]) if same_ranks else manifest.random["0"]
    numbers = decode(kept)
    if isinstance(model, ParallelModel):
        model._runtime.random.go_on(numbers["passes"])
    set_device_state(device_of(model), numbers)
    set_numbers_of_process(numbers["process"])


def set_device_state(device: torch.device | None, numbers: dict[str, Any]) -> None:
    """Sets the numbers of the device, if it is of the type that they were drawn on."""
    before = numbers.get(BEFORE)
    kept = (BEFORE, before) if before is not None else numbers.get("device")
    if device is not None and kept is not None and kept[0] == device.type:
        set_generator_state(device, kept[1])
