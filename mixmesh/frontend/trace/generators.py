"""Random numbers that a forward pass draws elsewhere than from torch: a program would hold the first ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import TraceError


@contextmanager
def drawn_by_torch_alone() -> Iterator[None]:
    """Within it runs a forward pass. Raises TraceError afterwards if it has drawn from the generators of
    Python or NumPy."""
    before = random.getstate(), _state_of_numpy()
    yield
    for name, was, now in zip(("random", "numpy.random"), before, (random.getstate(), _state_of_numpy())):
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


def _state_of_numpy() -> tuple[bytes, int]:
    state: Any = np.random.get_state()
    return state[1].tobytes(), state[2]
