"""Sums of gradients by levels: within each machine first, between machines then, and back.

What n ranks of m machines sum flat passes 2 (n - 1) / n times through every machine's NIC; summed within the
machines first it passes 2 (m - 1) / m times. With two devices in each of two machines that is two thirds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

Parts = tuple[tuple[int, ...], ...]  # some ranks by machine


@dataclass(frozen=True, slots=True)
class Levels:
    """``sizes`` are the consecutive ranks of each machine. Sums of less than ``least_bytes`` go flat: they
    are a matter of latency, of which levels have three."""

    sizes: tuple[int, ...]
    least_bytes: int = 0

    def parts(self, ranks: tuple[int, ...], size_bytes: int) -> Parts:
        """The ranks of a sum by machine; none where it goes flat: if it is small, or has one rank of each
        machine, or one machine."""
        if size_bytes < self.least_bytes:
            return ()
        ends = list(accumulate(self.sizes))
        by_machine = [tuple(r for r in ranks if e - n <= r < e) for n, e in zip(self.sizes, ends)]
        parts = tuple(part for part in by_machine if part)
        return parts if 1 < len(parts) < len(ranks) else ()


def leaders(parts: Parts) -> tuple[int, ...]:
    """The rank of each machine that speaks for it: its first."""
    return tuple(part[0] for part in parts)
