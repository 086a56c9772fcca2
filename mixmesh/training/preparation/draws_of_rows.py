"""Random numbers that a data set draws while a rank loads its own rows in this process.

Every rank loads other rows, and more or fewer of them. If they drew from the process's generator, its numbers
would then differ between ranks, and so would everything that the script draws next, such as new weights. So
the rows of each batch draw from a separate generator, seeded by the epoch, the batch and the rank, and the
process's numbers stay the same on all ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from .resuming import Numbers, fingerprint

SEED_BITS = 64


@dataclass(frozen=True)
class RowDraws:
    """The numbers of one rank for the batches of one epoch. ``base`` is the same on all ranks."""

    base: str
    rank: int

    @classmethod
    def of(cls, numbers: Numbers, epoch: int, rank: int) -> RowDraws:
        """The draws of this rank in an epoch whose order is drawn from ``numbers``."""
        process = "" if numbers.of_process is None else fingerprint(numbers.of_process)
        generators = repr({place: state.tolist() for place, state in numbers.generators.items()})
        return cls(hashlib.blake2b(f"{process} {generators} {epoch}".encode()).hexdigest(), rank)

    @contextmanager
    def loading(self, batch: int) -> Iterator[None]:
        """A context in which the process draws the rank's own numbers for this batch; afterwards it goes on
        as if nothing had been drawn."""
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        digest = hashlib.blake2b(f"{self.base} {batch} {self.rank}".encode(), digest_size=SEED_BITS // 8)
        seed = int.from_bytes(digest.digest())
        torch.default_generator.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])
