"""The cases of ``python -m benchmarks accuracy``: jobs on small emulated clusters, each under several plans.

The sum of a cluster's CPU shares stays at 1.3 of two cores: beyond 1.6 devices steal from each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from mixmesh.cluster import Cluster

from .measure import cluster_text

PLANNERS = ("ddp-even", "ddp-proportional", "fsdp-even", "tensor-parallel", "auto")


@dataclass(frozen=True)
class Setting:
    """A job of ``benchmarks/jobs.py`` on a cluster."""

    job: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.job}@{self.cluster}"


CLUSTERS: dict[str, str] = {
    "pair": cluster_text("1", ("0.50",), ("0.40",)),
    "far-pair": cluster_text("0.2", ("0.60",), ("0.20",)),
    "box": cluster_text("1", ("0.50", "0.30", "0.20")),
    "three": cluster_text("1", ("0.50",), ("0.30",), ("0.20",)),
    "skewed": cluster_text("0.5", ("0.60", "0.30"), ("0.25", "0.12")),
    "slow-link": cluster_text("0.1", ("0.35", "0.35"), ("0.20", "0.20")),
    "five": cluster_text("5", ("0.35", "0.35"), ("0.22", "0.22", "0.12")),
}

SETTINGS = (
    Setting("gpt", "pair"),
    Setting("gpt", "skewed"),
    Setting("gpt", "five"),
    Setting("moe", "three"),
    Setting("moe", "slow-link"),
    Setting("vgg", "skewed"),
    Setting("vgg", "box"),
    Setting("mlp", "far-pair"),
)
QUICK = SETTINGS[:2]


def cluster_of(setting: Setting) -> Cluster:
    return Cluster.parse(CLUSTERS[setting.cluster], where=f"bench accuracy, {setting.cluster}")
