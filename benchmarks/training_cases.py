"""The cases of ``python -m benchmarks training``, and the target of each.

The sum of a cluster's CPU shares stays at 1.3 of two cores: beyond 1.6 devices steal from each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from mixmesh.cluster import Cluster

from .accuracy_cases import CLUSTERS as UNEQUAL
from .measure import cluster_text

CLUSTERS: dict[str, str] = {
    **UNEQUAL,
    "equal-pair": cluster_text("1", ("0.60",), ("0.60",)),
    "four": cluster_text("1", ("0.50",), ("0.35",), ("0.25",), ("0.20",)),
    "four-boxes": cluster_text("0.2", ("0.42",), ("0.34",), ("0.30",), ("0.24",)),
    "equal-four": cluster_text("1", ("0.30", "0.30"), ("0.30", "0.30")),
}
AS_FAST = 0.98  # relative to the best baseline: two measurements of one program may differ by as much
PARALLEL = ("ddp-even", "ddp-proportional", "fsdp-even")
ALL = ("single", "machine", *PARALLEL)


@dataclass(frozen=True)
class Race:
    """The plan of ``auto`` for a job of ``benchmarks/jobs.py`` must be ``target`` times as fast as the best
    baseline of ``against``, and as the plan for a graph made without the pass ``without``, if any. Its
    speed-up is stated over the best of all baselines."""

    name: str
    job: str
    cluster: str
    target: float
    against: tuple[str, ...] = ALL
    without: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.cluster}"

    @property
    def profiled(self) -> str:
        return self.job


@dataclass(frozen=True)
class Sweep:
    """Plans for ``job:N`` with N of ``counts``, each compared with the plan for N padded to a multiple of the
    devices, and with that plan with equal shares, which is the reason for padding.

    No time may be more than ``bump`` above the mean of its neighbours; no plan may be slower than the padded
    one, and the largest gain must reach ``gain``: over the padded plan, and over that plan with equal shares.
    5 on 4 devices are padded to 8, 1.6 times as many: the most that padding alone can cost.
    """

    name: str
    job: str
    cluster: str
    counts: tuple[int, ...]
    profiled_count: int  # the count whose profile serves all: noise between several would look like bumps
    bump: float
    gain: float

    def __str__(self) -> str:
        return f"{self.name}@{self.cluster}"

    @property
    def profiled(self) -> str:
        return f"{self.job}:{self.profiled_count}"


Case = Race | Sweep

CASES: tuple[Case, ...] = (
    Race("vgg", "vgg19", "skewed", 2.41, PARALLEL),
    Race("transformer", "bert", "pair", AS_FAST),
    Race("transformer", "bert", "far-pair", AS_FAST),
    Race("transformer", "bert", "three", AS_FAST),
    Race("transformer", "bert", "slow-link", 1.28),
    Race("transformer", "bert", "five", AS_FAST),
    Sweep("moe", "experts", "skewed", tuple(range(3, 10)), profiled_count=6, bump=0.10, gain=1.6),
    Race("mixtral", "mixtral", "four", 1.5, ("fsdp-even",), without="mixtures_as_operators"),
    Race("vocabulary", "words", "four-boxes", 2.0),
    Race("equal", "bert", "equal-pair", AS_FAST),
    Race("equal", "bert", "equal-four", AS_FAST),
)
QUICK: tuple[Case, ...] = (
    CASES[0],
    CASES[4],
    Sweep("moe", "experts", "skewed", (4, 5), profiled_count=5, bump=0.10, gain=1.6),
    CASES[8],
)


@dataclass(frozen=True)
class Effort:
    """Every variant has ``rounds`` turns of about ``turn_s``, of at most
    ``max_steps`` steps. The losses of the first ``checked_steps`` are compared."""

    profile_s: float  # for every case
    rounds: int
    turn_s: float
    max_steps: int
    checked_steps: int = 8


FULL = Effort(profile_s=25.0, rounds=5, turn_s=1.6, max_steps=5)
SHORT = Effort(profile_s=12.0, rounds=3, turn_s=0.8, max_steps=2, checked_steps=5)


def cluster_of(case: Case) -> Cluster:
    return Cluster.parse(CLUSTERS[case.cluster], where=f"bench training, {case.cluster}")


def padded(count: int, world_size: int) -> int:
    """The least multiple of ``world_size`` that is not below ``count``."""
    return -(-count // world_size) * world_size
