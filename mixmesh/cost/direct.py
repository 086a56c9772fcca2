"""Where sums of few bytes are faster if every rank sends its addend to every other one."""

from __future__ import annotations

from .collectives import DIRECT, on_gpus
from .exchanges import Exchange
from .levels import MARGIN
from .model import CostModel
from .unmeasured import ONE_SHOT_SUMS

SIZES_BYTES = tuple(2**n for n in range(8, 19))  # every rank holds all addends: not of large ones


def best_direct_bytes(costs: CostModel) -> int:
    """The largest size up to which sums between all ranks are faster so; 0 if not even small ones are, where
    devices are CPUs, and where neither a profile has measured such sums nor the caller counts on them without
    (``ONE_SHOT_SUMS`` in ``costs.unmeasured``).

    A library's sum takes two hops for every level of a tree, or two for every rank of a ring. This one takes
    a single hop, and n - 1 times the bytes. On emulated CPUs gloo's sums are a fifth as fast in a loop, and
    yet no slower in a training step (``python -m benchmarks sync --only small-sums``): who waits for one
    saves up processor time meanwhile, and who has none left is late either way.
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
