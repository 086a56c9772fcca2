"""What a script that every rank runs must have alike: its random numbers and its batches."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..errors import InputError
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
    digest = hashlib.blake2b(digest_size=8)
    for path, value in sorted(
        ((pytree.keystr(path), value) for path, value in pytree.tree_flatten_with_path(batch)[0]),
        key=lambda item: item[0],
    ):
        if isinstance(value, torch.Tensor):
            digest.update(path.encode() + repr(tuple(value.shape)).encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.digest())
    if len(set(digests)) > 1:
        raise InputError(
            "the ranks did not make the same batch",
            expected="the same samples, and the same random numbers where samples are changed at random",
            got=f"{len(set(digests))} different batches on {len(digests)} ranks",
            hint=(
                "draw by torch, random or numpy.random, seeded alike, not from a generator without a seed",
                "the same data set, in the same order, on every rank",
            ),
        )
