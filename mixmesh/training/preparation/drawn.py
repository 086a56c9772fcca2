"""Notices random numbers that a loop draws between its loader and its model: noise for a rank's own rows
would not equal one device's noise, and would not even differ between ranks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...base.callers import variables_of_script, warn
from ...frontend.trace.own_generators import GENERATORS, OF_PROCESS
from ...runtime.device_random import drawing_device, generator_state

Read = Callable[[], bytes]
MESSAGE = (
    "random numbers were drawn between the loader and the model, by each rank for its own rows: if they are "
    "noise or mixtures of samples, they are not those of one device, and may be the same for other samples. "
    "Write mixmesh.prepare(..., inputs=function), with the function that draws them, or let the data set "
    "draw them. One number for the whole batch is right, and the same on all ranks"
)


class DrawWatch:
    """Remembers the state of the random numbers of PyTorch, Python and NumPy when the loader gives a batch,
    and compares it when the model is called with the batch. Warns once, on the first rank."""

    def __init__(self) -> None:
        self._given: list[tuple[Read, bytes]] | None = None
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
        if any(read() != state for read, state in states):
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
    """Yields functions that return the states of generators from which loops draw: PyTorch's on the CPU and
    on the current GPU, Python's, NumPy's, and variables of the script. They are called twice a step, so
    ``marks_of``, which takes milliseconds, would be too slow."""
    yield partial(state_of, torch.default_generator)
    device = drawing_device()
    if device is not None:
        yield lambda: generator_state(device).numpy().tobytes()
    own = {id(x): x for x in variables_of_script() if isinstance(x, GENERATORS)}
    yield from (partial(state_of, generator) for generator in (*OF_PROCESS, *own.values()))


def state_of(generator: Any) -> bytes:
    """The state of a generator of PyTorch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.SystemRandom):
        return b""  # it has none
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    is_legacy = isinstance(generator, np.random.RandomState)
    state = generator.get_state(legacy=False) if is_legacy else generator.bit_generator.state
    return pickle.dumps(state)
