"""Finds the sizes from which hierarchical sums of gradients pay off (``ir.levels``)."""

from __future__ import annotations

from collections.abc import Sequence

from ..cluster import Cluster
from ..lang.ir import Levels
from .exchanges import Exchange
from .model import CostModel

SIZES_BYTES = tuple(2**n for n in range(12, 27, 2))
MARGIN = 0.05  # share of its seconds that a sum must save: less is noise


def best_levels(costs: CostModel, ranks: Sequence[int] | None = None) -> Levels | None:
    """The levels of the cluster's machines, with the size from which hierarchical sums between all ranks, or
    between ``ranks``, are faster; None if even large ones are not."""
    cluster = costs.cluster
    everyone = tuple(range(cluster.world_size) if ranks is None else ranks)
    levels = Levels(machine_sizes(cluster))
    if not levels.parts(everyone, 0):
        return None
    least = None
    for size in reversed(SIZES_BYTES):
        flat, levelled = (Exchange("all_reduce", size, everyone, levelled=by) for by in (False, True))
        if levelled.seconds(costs) - levelled.lag_s(costs) > flat.seconds(costs) * (1 - MARGIN):
            break
        least = size
    return None if least is None else Levels(levels.sizes, least)


def machine_sizes(cluster: Cluster) -> tuple[int, ...]:
    """The number of devices of each machine; those of a machine are consecutive ranks."""
    return tuple(len(cluster.ranks_of(m)) for m in range(len(cluster.machines)))
