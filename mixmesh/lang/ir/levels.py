"""Hierarchical all-reduce of gradients: sums within each machine, then between machines, and back.

A flat all-reduce of n ranks in m machines sends 2 (n - 1) / n times the tensor through every machine's NIC, a
hierarchical one 2 (m - 1) / m times. With two devices in each of two machines that is two thirds as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

Parts = tuple[tuple[int, ...], ...]  # ranks by machine


@dataclass(frozen=True, slots=True)
class Levels:
    """``sizes`` are the numbers of consecutive ranks of each machine. All-reduces of less than
    ``least_bytes`` stay flat: their time is mostly latency, which a hierarchical one has three times."""

    sizes: tuple[int, ...]
    least_bytes: int = 0

    def parts(self, ranks: tuple[int, ...], size_bytes: int) -> Parts:
        """Splits the ranks of an all-reduce, in order, by machine. Empty if it stays flat: because it is
        small, lies within one machine, or has one rank of each."""
        return () if size_bytes < self.least_bytes else _parts(self.sizes, ranks)


@lru_cache(maxsize=4096)
def _parts(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> Parts:
    machine_of = [m for m, count in enumerate(sizes) for _ in range(count)]
    parts = tuple(tuple(part) for _, part in groupby(ranks, key=machine_of.__getitem__))
    return parts if 1 < len(parts) < len(ranks) else ()


def leaders(parts: Parts) -> tuple[int, ...]:
    """The first rank of each machine, which takes part in the sum between machines."""
    return tuple(part[0] for part in parts)
