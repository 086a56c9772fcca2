"""The random numbers of a rank: of torch, Python, numpy and the device, and how far its model has drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..training.preparation.resuming import numbers_of_process, set_numbers_of_process
from .manifest import Manifest
from .values import decode, encode


def random_state(model: nn.Module) -> Any:
    """The states of this rank's random numbers, encoded."""
    device = model.comm.device if hasattr(model, "_runtime") else None
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda")
    on_gpu = device is not None and device.type == "cuda"
    numbers = {
        "process": numbers_of_process(),
        "cuda": torch.cuda.get_rng_state(device) if on_gpu else None,
        "passes": model._runtime.random.step if hasattr(model, "_runtime") else 0,
    }
    return encode(numbers, "the state of random numbers")


def restore_random_state(model: nn.Module, manifest: Manifest, rank: int, world_size: int) -> None:
    """Has this rank draw what the run that saved would have drawn next. Where the number of ranks is another
    one all of them draw what the first one would have."""
    same_ranks = manifest.world_size == world_size
    kept = manifest.random.get(str(rank), manifest.random["0"]) if same_ranks else manifest.random["0"]
    numbers = decode(kept)
    if hasattr(model, "_runtime"):
        model._runtime.random.go_on(numbers["passes"])
    if numbers["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(numbers["cuda"])
    set_numbers_of_process(numbers["process"])
