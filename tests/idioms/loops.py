"""Loops that are run by one device and by all ranks through ``mixmesh.prepare``, to be compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from plans import close
from torch import nn

import mixmesh

KINDS = ("ddp-even", "fsdp-even")

Loop = Callable[[nn.Module, torch.optim.Optimizer, Any], Iterator[Any]]


def rows(count: int = 21, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g, dtype=torch.float64)
    return list(zip(x, torch.randint(4, (count,), generator=g)))


def batches(size: int = 7, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    every = rows(**options)
    parts = [every[n : n + size] for n in range(0, len(every), size)]
    return [tuple(map(torch.stack, zip(*part))) for part in parts]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def prepare(model, optimizer, loader, *, planner: str = "fsdp-even", **options: Any):
    cache = os.path.join(tempfile.gettempdir(), f"mixmesh-idioms-{os.environ['MASTER_PORT']}")
    return mixmesh.prepare(
        model, optimizer, loader, planner=planner, profile_s=0, cache=cache, timeout_s=60, **options
    )


@contextmanager
def one_device() -> Iterator[None]:
    """Within it ``mixmesh.prepare`` finds no launch."""
    rank = os.environ.pop("RANK")
    try:
        yield
    finally:
        os.environ["RANK"] = rank


def numbers(loop: Callable[[], Iterator[Any]]) -> list[torch.Tensor]:
    """The losses, or whatever numbers, that a loop gives."""
    torch.manual_seed(5)
    return [torch.as_tensor(x).detach().clone() for x in loop()]


def check_same(loop: Callable[..., Iterator[Any]], kinds: tuple[str, ...] = KINDS) -> None:
    """Runs ``loop(prepare)``, a script that yields numbers, on one device and by all ranks under every kind
    of plan, and compares what they yield."""
    with one_device():
        expected = numbers(lambda: loop(prepare))
    for kind in kinds:
        got = numbers(partial(loop, partial(prepare, planner=kind)))
        assert len(got) == len(expected), kind
        for n, (a, b) in enumerate(zip(got, expected)):
            close(a, b, f"{kind}, number {n}")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Iterator[torch.Tensor]:
    """An epoch whose model returns its loss."""
    for batch in loader:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
