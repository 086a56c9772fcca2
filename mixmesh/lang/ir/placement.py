"""Placements: how one tensor is held across the ranks.

The sizes of shards are decided only here: of a dim of ``size`` elements, cut in multiples of ``unit``
elements by ratio ``r``, rank j holds ``shard_sizes(size, r, unit)[j]`` elements, by largest remainder.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

Ratio = tuple[float, ...]  # world_size shares that add up to 1

RATIO_DIGITS = 6


class Scope(IntEnum):  # an int is hashed fast
    """The samples to which a rank's share refers: its own in the whole step, or its own in one micro-batch.
    Only the cost model uses the latter, for the program of a micro-batch (``cost.micro_steps``); program text
    does not have it."""

    STEP = 0
    MICRO_BATCH = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank j holds a contiguous piece of ``dim``, in multiples of ``unit`` elements.

    Compound dims need a unit: an attention layer is cut in multiples of the head size, a flattened
    (batch, time) dim in multiples of the time.
    """

    dim: int
    unit: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.unit == 1 else f"S({self.dim}, {self.unit})"

    def dealt(self, size: int) -> Shard:
        """The placement of an input of ``size`` elements in a batch of another size than planned: in single
        elements if the unit does not divide them."""
        return self if size % self.unit == 0 else Shard(self.dim)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds an addend of the full shape (or a candidate, for ``max``)."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Shard | Replicate | Partial
REPLICATE = Replicate()
PARTIAL = Partial()


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a tensor held as ``placement``.

    The gradient of a redistribution ``src -> dst`` is the redistribution ``dual(dst) -> dual(src)``.
    """
    if isinstance(placement, Replicate):
        return PARTIAL
    if isinstance(placement, Partial):
        return REPLICATE
    return placement


def make_ratio(shares: Iterable[float]) -> Ratio:
    """Scales shares to sum to 1 and rounds them, so that their text is exact.

    The rounding residue goes to the largest share. Raises ValueError for negative or non-finite shares.
    """
    shares = [float(s) for s in shares]
    if not shares or any(not math.isfinite(s) or s < 0 for s in shares) or sum(shares) <= 0:
        raise ValueError(f"a ratio needs finite shares >= 0 with a positive sum, got {shares}")
    total = sum(shares)
    rounded = [round(s / total, RATIO_DIGITS) for s in shares]
    largest = max(range(len(rounded)), key=rounded.__getitem__)
    rounded[largest] = round(1.0 - sum(rounded[:largest] + rounded[largest + 1 :]), RATIO_DIGITS)
    return tuple(rounded)


def even_ratio(world_size: int) -> Ratio:
    return make_ratio([1.0] * world_size)


@lru_cache(maxsize=4096)
def is_even(ratio: Ratio) -> bool:
    """Whether all ranks have equal shares, up to rounding."""
    return ratio == even_ratio(len(ratio))


def ratio_of_speeds(seconds: Sequence[float], ranks: Collection[int]) -> Ratio:
    """Shares of ``ranks`` in proportion to their speeds, above zero for every one of them, however slow;
    ``seconds`` gives the time of each rank."""
    speeds = {rank: 1 / max(seconds[rank], 1e-12) for rank in ranks}
    least = 2 * 10**-RATIO_DIGITS * sum(speeds.values())  # rounding does not make this zero
    return make_ratio([max(speeds[r], least) if r in speeds else 0.0 for r in range(len(seconds))])


@lru_cache(maxsize=4096)
def support(ratio: Ratio) -> tuple[int, ...]:
    """The participating ranks: those with a share above zero."""
    return tuple(j for j, share in enumerate(ratio) if share > 0)


@lru_cache(maxsize=65536)
def shard_sizes(size: int, ratio: Ratio, unit: int = 1) -> tuple[int, ...]:
    """The number of elements of each rank: ``size`` cut in units by ``ratio``, rounded by largest remainder.

    Ties go to the lower rank. A rank with a share of zero gets none. Raises ValueError if ``unit`` does not
    divide ``size``.
    """
    if size % unit:
        raise ValueError(f"a dim of {size} cannot be cut in units of {unit}")
    num_units = size // unit
    # 0.333333 must count as a third: tolerate the rounding of the ratio itself
    exact = [num_units * share for share in ratio]
    near = [round(x) if abs(x - round(x)) <= num_units * 10**-RATIO_DIGITS else x for x in exact]
    floors = [math.floor(x) for x in near]
    order = sorted(range(len(ratio)), key=lambda j: (-(near[j] - floors[j]), j))
    missing = num_units - sum(floors)
    takers = [j for j in order if ratio[j] > 0]
    for k in range(max(missing, 0)):
        floors[takers[k % len(takers)]] += 1
    for j in sorted(takers, key=lambda j: near[j] - floors[j]) if missing < 0 else ():
        if missing < 0 and floors[j] > 0:
            floors[j] -= 1
            missing += 1
    return tuple(n * unit for n in floors)


def shard_offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The first element of each rank's piece."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += size
    return tuple(offsets)
