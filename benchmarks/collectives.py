"""The algorithms of collectives on unequal pieces, measured over the skew of the pieces, and the one that a
plan chooses.

The skew is the largest piece over the mean one. With padding every rank sends a piece of the largest size;
grouped algorithms send one broadcast or reduce per piece, whatever its size (HAP, EuroSys'24, section 4.2). A
plan knows its profile's measurements, of even pieces and of pieces in proportion to speed: here the least and
the largest skew. An all_to_all has one algorithm, which sends pieces as they are.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mixmesh.cluster import Cluster
from mixmesh.cost import LinkMeasurement, default_algorithm
from mixmesh.cost.links import measured_collective
from mixmesh.measure.profiler.links import ALGORITHMS, whole_bytes

from .measure import call, cluster_text
from .training import Progress

WORKER = (sys.executable, "-m", "benchmarks.collectives_worker")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
GROUPED = {"all_gather": "broadcasts", "reduce_scatter": "reduces"}
REGRET = 1.10  # how much slower than the fastest algorithm a plan's choice may be in the mean


@dataclass(frozen=True)
class Sweep:
    """Pieces of which the first is ``skew`` times the mean, and all others are equal."""

    cluster: str
    skews: tuple[float, ...]
    sizes_bytes: tuple[int, ...]
    rounds: int


FULL = Sweep(
    cluster_text("1", ("0.35", "0.35"), ("0.20", "0.20")),
    (1.0, 1.5, 2.0, 2.5, 3.0, 3.6),
    (2**16, 2**20, 2**22, 2**24),
    rounds=3,
)
QUICK = Sweep(FULL.cluster, (1.0, 2.0, 3.6), (2**18, 2**22), rounds=1)


@dataclass(frozen=True)
class Row:
    """Seconds of every algorithm of a collective at one size and skew; the one that a plan chooses with a
    profile, and the runtime's default."""

    collective: str
    size_bytes: int
    skew: float
    seconds: dict[str, float]
    planned: str
    default: str

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def regret(self) -> float:
        return self.seconds[self.planned] / self.seconds[self.fastest]

    @property
    def default_regret(self) -> float:
        return self.seconds[self.default] / self.seconds[self.fastest]


def shares(skew: float, world_size: int) -> tuple[float, ...]:
    first = skew / world_size
    return (first, *[(1 - first) / (world_size - 1)] * (world_size - 1))


def run(sweep: Sweep, say: Progress) -> tuple[list[Row], str]:
    """All rows, and how the cluster was emulated."""
    cluster = Cluster.parse(sweep.cluster, where="bench collectives")
    cases = [
        (name, how, skew)
        for name in COLLECTIVES
        for how in ALGORITHMS.get(name, ("",))
        for skew in sweep.skews
    ]
    asked = [(name, how, shares(skew, cluster.world_size)) for name, how, skew in cases]
    words = (json.dumps(asked), json.dumps(sweep.sizes_bytes), str(sweep.rounds))
    printed, emulation = call(WORKER, cluster, *words, say=say)
    found = {
        case: [statistics.median(times) for times in by_size]
        for case, by_size in zip(cases, json.loads(printed))
    }
    return rows(sweep, cluster, found), emulation


def rows(sweep: Sweep, cluster: Cluster, found: dict[tuple[str, str, float], Sequence[float]]) -> list[Row]:
    """``found``: by collective, form and skew, the seconds at every size."""
    everyone = tuple(range(cluster.world_size))
    ends = (min(sweep.skews), max(sweep.skews))
    profile = tuple(
        LinkMeasurement(name, how, everyone, tuple(zip(map(whole_bytes, sweep.sizes_bytes), times)), skew)
        for (name, how, skew), times in found.items()
        if skew in ends
    )
    out = []
    for name in COLLECTIVES:
        cost = measured_collective(cluster, profile, name, everyone)
        for n, size in enumerate(sweep.sizes_bytes):
            for skew in sweep.skews:
                seconds = {how: times[n] for (c, how, s), times in found.items() if (c, s) == (name, skew)}
                planned = cost.algorithm(whole_bytes(size), skew) or ""
                out.append(Row(name, size, skew, seconds, planned, default_algorithm(name, "gloo", skew)))
    return out


def crossing(chosen: Sequence[Row]) -> float | None:
    """The skew from which padding is slower than the grouped form, in rows of one collective and size; None
    if padding is never faster, infinite if it always is."""
    grouped = GROUPED[chosen[0].collective]
    points = [(r.skew, r.seconds["padded"] / r.seconds[grouped] - 1) for r in sorted(chosen, key=_skew)]
    if points[0][1] >= 0:
        return None
    for (a, before), (b, after) in zip(points, points[1:]):
        if after >= 0:
            return a + (b - a) * before / (before - after)
    return float("inf")


def _skew(row: Row) -> float:
    return row.skew


def mean_regret(found: Sequence[Row]) -> float:
    return statistics.fmean(r.regret for r in found)


def report(found: Sequence[Row], emulation: str, command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    return {
        "bench": "collectives",
        "command": command,
        "emulation": [emulation],
        "mean_regret": mean_regret(found),
        "mean_default_regret": statistics.fmean(r.default_regret for r in found),
        "targets": {
            f"what the plan takes within {REGRET - 1:.0%} of the fastest": mean_regret(found) <= REGRET
        },
        "rows": [
            {
                "collective": r.collective,
                "size_bytes": r.size_bytes,
                "skew": r.skew,
                "seconds": r.seconds,
                "fastest": r.fastest,
                "planned": r.planned,
                "default": r.default,
            }
            for r in found
        ],
    }
