"""Sums of gradients by levels: within each machine first, between machines then, and back.

A flat sum of n ranks in m machines passes 2 (n - 1) / n times through every machine's NIC; summed within the
machines first it passes 2 (m - 1) / m times. With two devices in each of two machines that is two thirds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

Parts = tuple[tuple[int, ...], ...]  # some ranks by machine


@dataclass(frozen=True, slots=True)
class Levels:
    """``sizes`` are the consecutive ranks of each machine. Sums of less than ``least_bytes`` go flat: they
    are a matter of latency, of which levels have three."""

    sizes: tuple[int, ...]
    least_bytes: int = 0

    def parts(self, ranks: tuple[int, ...], size_bytes: int) -> Parts:
        """The ranks of a sum, in order, by machine; none where it goes flat: if it is small, or has one rank
        of each machine, or one machine."""
        return () if size_bytes < self.least_bytes else _parts(self.sizes, ranks)


@lru_cache(maxsize=4096)
def _parts(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> Parts:
    machine_of = [m for m, count in enumerate(sizes) for _ in range(count)]
    parts = tuple(tuple(part) for _, part in groupby(ranks, key=machine_of.__getitem__))
    return parts if 1 < len(parts) < len(ranks) else ()


def leaders(parts: Parts) -> tuple[int, ...]:
    """The rank of each machine that speaks for it: its first."""
    return tuple(part[0] for part in parts)
