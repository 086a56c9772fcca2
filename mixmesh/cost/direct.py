"""Finds the size up to which one-shot sums, in which every rank sends to every other one, are faster."""

from __future__ import annotations

from .collectives import DIRECT, on_gpus
from .exchanges import Exchange
from .levels import MARGIN
from .model import CostModel
from .unmeasured import ONE_SHOT_SUMS

SIZES_BYTES = tuple(2**n for n in range(8, 19))  # no large sizes, because every rank holds all addends


def best_direct_bytes(costs: CostModel) -> int:
    """The largest size up to which one-shot sums between all ranks are faster. 0 if not even small ones are,
    if devices are CPUs, or if such sums were neither measured by a profile nor counted on by the caller
    (``ONE_SHOT_SUMS`` in ``costs.unmeasured``).

    A library's sum takes two hops for every level of a tree, or two for every rank of a ring. A one-shot sum
    takes a single hop, and n - 1 times the bytes. On emulated CPUs gloo's sums are a fifth as fast in a loop,
    and yet no slower in a training step (``python -m benchmarks sync --only small-sums``): a rank that waits
    for a sum saves up CPU time meanwhile, and one without any left is late either way.
    """
    everyone = tuple(range(costs.cluster.world_size))
    if len(everyone) < 2 or not on_gpus(costs.cluster, everyone):
        return 0
    if ONE_SHOT_SUMS not in costs.unmeasured and not costs.has_measured(DIRECT, everyone):
        return 0
    most = 0
    for size in SIZES_BYTES:
        usual, direct = (Exchange("all_reduce", size, everyone, direct=how) for how in (False, True))
        if direct.seconds(costs) > usual.seconds(costs) * (1 - MARGIN):
            break
        most = size
    return most
