"""Steps on one device, as people write them, for the benches and checks that compare with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
Step = Callable[[], Tensor]


def as_one_process() -> None:
    """Sets what torchrun would, for a world of this process alone."""
    for name, value in ONE_PROCESS.items():
        os.environ.setdefault(name, value)


def step_of(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    context: Callable[[], AbstractContextManager] = nullcontext,
) -> Step:
    """A function that makes a step, its forward pass in a ``context``, and gives the loss."""

    def step() -> Tensor:
        with context():
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
