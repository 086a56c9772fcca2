"""What a script that every rank runs must have alike: its random numbers and its batches."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from ..preparation.alike import check_same
from ..runtime.first_rank import from_first_rank


def is_launched() -> bool:
    """Whether torchrun, or another launcher, started this process as one of several."""
    return "RANK" in os.environ


def take_random_numbers() -> None:
    """Continues the random numbers of the first rank on every rank. Collective."""
    python, numpy, of_torch = from_first_rank(
        lambda: (random.getstate(), np.random.get_state(), torch.get_rng_state())
    )
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(of_torch)


def check_alike(batch: Any) -> None:
    """Raises InputError, on all ranks, if the tensors of ``batch`` differ between ranks. Collective."""
    check_same(
        batch,
        "draw by torch, random or numpy.random, seeded alike, not from a generator without a seed",
        "the same data set, in the same order, on every rank",
    )
