"""Refuses random numbers that a program could not reproduce. A forward pass may draw only from torch, since a
program would keep the first numbers of any other generator. A loss outside of the model may draw none, since
on one device they come from the script's generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import TraceError
from ...lang.ir.samples import draws_numbers
from .own_generators import OF_PROCESS, generators_in, marks_of


class NoDraws(TorchDispatchMode):
    """A context for a loss that the script computes. Raises TraceError if it draws random numbers: in a
    program they would differ from those of one device, which come from the script's generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = str(func)
        if draws_numbers(name):
            raise TraceError(
                "the loss draws random numbers: in a program they would not be those of one device",
                expected="a loss of what the model returns and of the batch",
                got=f"a draw by {name.removeprefix('aten.').partition('.')[0]}",
                hint=(
                    "draw them with the batch: mixmesh.prepare(..., loss=lambda out, y, noise: ..., "
                    "inputs=lambda x, y: (x, y, torch.rand(len(x))))",
                    "or in the model's forward, as dropout does: other numbers, alike in distribution",
                ),
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def drawn_by_torch_alone(model: nn.Module) -> Iterator[None]:
    """A context for a forward pass of ``model``. Raises TraceError afterwards if it has drawn from the
    generators of Python or NumPy, whether the process's or the script's own."""
    own = [each for each in generators_in(model) if not isinstance(each, torch.Generator)]
    names = ("random", "numpy.random", *(f"a generator of its own ({type(each).__name__})" for each in own))

    def marks() -> list[str]:
        return [marks_of([each]) for each in (*OF_PROCESS, *own)]

    before = marks()
    yield
    for name, was, now in zip(names, before, marks()):
        if was != now:
            raise TraceError(
                f"the forward pass draws from {name}: every step would have the numbers of the first",
                expected="random numbers of torch, which are operators of the program",
                got=f"a draw from {name}",
                hint=(
                    "torch.rand(()) < p with torch.where, in place of random.random() < p",
                    "numbers that are drawn in the loop, and passed to the model as a tensor of the batch",
                ),
            )
