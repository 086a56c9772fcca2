"""Notices random numbers that a loop draws between its loader and its model: noise for a rank's own rows
would not equal one device's noise, and would not even differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...base.callers import variables_of_script, warn
from ...runtime.device_random import drawing_device, generator_state

Read = Callable[[], torch.Tensor]
MESSAGE = (
    "random numbers were drawn between the loader and the model, by each rank for its own rows: if they are "
    "noise or mixtures of samples, they are not those of one device, and may be the same for other samples. "
    "Write mixmesh.prepare(..., inputs=function), with the function that draws them, or let the data set "
    "draw them. One number for the whole batch is right, and the same on all ranks"
)


class DrawWatch:
    """Remembers the state of PyTorch's random numbers when the loader gives a batch, and compares it when the
    model is called with the batch. Warns once, on the first rank."""

    def __init__(self) -> None:
        self._given: list[tuple[Read, torch.Tensor]] | None = None
        self._has_warned = False

    def on_batch(self) -> None:
        """Called when a batch has been given to the script."""
        if not self._has_warned:
            self._given = [(read, read()) for read in readers()]

    def on_call(self) -> None:
        """Called before the model runs: compares in the first call after a batch."""
        states, self._given = self._given, None
        if states is None or not torch.is_grad_enabled():
            return
        if any(not torch.equal(read(), state) for read, state in states):
            self._has_warned = True
            if dist.get_rank() == 0:
                warn(MESSAGE)

    def watching(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; ``on_batch`` is called for each."""
        return Watched(batches, self)


class Watched:
    """An iterator that reports each batch to a watch. It is not a generator, whose frame would keep the
    batch."""

    def __init__(self, batches: Iterator[Any], watch: DrawWatch) -> None:
        self._batches, self._watch = batches, watch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._watch.on_batch()
        return batch


def readers() -> Iterator[Read]:
    """Yields functions that return the states of generators from which loops draw: the CPU's, the current
    GPU's, and variables of the script."""
    yield torch.get_rng_state
    device = drawing_device()
    if device is not None:
        yield partial(generator_state, device)
    own = {id(x): x for x in variables_of_script() if isinstance(x, torch.Generator)}
    yield from (generator.get_state for generator in own.values())
