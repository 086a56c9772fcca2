"""From a model that fails to a smaller one that fails too."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .source import Source, simpler

SHRINK_S = 60.0  # at most, for one failure


def shrunk(source: Source, fails: Callable[[Source], bool], limit_s: float = SHRINK_S) -> Source:
    """The smallest source found within ``limit_s`` for which ``fails`` holds, as it does for ``source``."""
    until = time.monotonic() + limit_s
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(source, kinds_of_values(source)):
            if time.monotonic() >= until:
                return source
            if len(str(candidate)) < len(str(source)) and fails(candidate):
                source, smaller = candidate, True
                break
    return source


def kinds_of_values(source: Source) -> dict[str, tuple]:
    """Shape and dtype of every tensor of a forward pass, by name."""
    model, batch = source.build()
    space: dict = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, "self": model, **batch}
    with torch.no_grad():
        for line in source.lines:
            exec(str(line), space)
    names = [*batch, *(line.name for line in source.lines)]
    held = {name: space[name] for name in names if isinstance(space.get(name), torch.Tensor)}
    return {name: (tuple(value.shape), str(value.dtype)) for name, value in held.items()}
