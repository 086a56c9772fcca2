"""The cases that ``python -m benchmarks poplar`` measures and simulates, and the target of each.

The clusters are small versions of Poplar's three: in A memories differ, in B speeds, in C both; the first
machine is the fast or large one. The sum of a cluster's CPU shares stays at 1.3 of two cores: beyond 1.6
devices steal from each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from mixmesh.cluster import Cluster

STAGES = (0, 1, 2, 3)
AS_FAST = 0.98  # required share of another's speed: two measurements of one program may differ by as much
MEMORY_TOLERANCE = 0.15
FIRST_STEP = "first-step"  # the case's name
FIRST_STEP_S = 90.0

NETWORK = "[network]\nbandwidth_gbit_per_s = 1\nlatency_us = 50\n"


def machine(name: str, count: int, cpu_share: str, memory_gib: str) -> str:
    device = f'name = "cpu-{name}", cpu_share = {cpu_share}, memory_gib = {memory_gib}, count = {count}'
    return f'[[machine]]\nname = "{name}"\ndevices = [{{ {device} }}]\n'


@dataclass(frozen=True)
class Measured:
    """``job`` of ``benchmarks/jobs.py`` on an emulated cluster, whose first machine is the better half.

    The best stage of ours must be ``target`` times as fast as equal micro-batches at their best. If it
    ``overflows``, equal parts without micro-batches must run out of memory.
    """

    name: str
    job: str
    cluster_text: str
    target: float
    overflows: bool

    def __str__(self) -> str:
        return self.name

    @property
    def cluster(self) -> Cluster:
        return Cluster.parse(self.cluster_text, where=f"bench poplar, {self.name}")


@dataclass(frozen=True)
class Simulated:
    """A workload at Poplar's global batch on the preset of one of its clusters."""

    workload: str
    preset: str

    def __str__(self) -> str:
        return f"{self.workload}@{self.preset}"


MEASURED = (
    Measured(
        "a",
        "llama:160",
        NETWORK + machine("large", 2, "0.30", "1.25") + machine("small", 2, "0.30", "0.55"),
        target=AS_FAST,  # all devices are equally fast, so the target is not to be slower
        overflows=True,
    ),
    Measured(
        "b",
        "llama:96",
        NETWORK + machine("fast", 2, "0.46", "1.25") + machine("slow", 2, "0.14", "1.25"),
        target=1.5,
        overflows=False,
    ),
    Measured(
        "c",
        "llama:160",
        NETWORK + machine("fast", 2, "0.45", "1.25") + machine("slow", 2, "0.18", "0.55"),
        target=1.3,
        overflows=True,
    ),
)
# 2 million tokens in sequences of 1024
GLOBAL_BATCH = 2048
SIMULATED = tuple(
    Simulated(workload, preset)
    for preset in ("poplar-a", "poplar-b", "poplar-c")
    for workload in ("llama-0.5b", "llama-1.1b")
)


@dataclass(frozen=True)
class Effort:
    """Every variant has ``rounds`` runs of ``steps`` that count, after ``WARMUP_STEPS`` that do not."""

    profile_s: float  # for every case
    rounds: int
    steps: int
    stages: tuple[int, ...] = STAGES

    @property
    def all_steps(self) -> int:
        return WARMUP_STEPS + self.steps


WARMUP_STEPS = 3  # during which the heap grows to its final size
FULL = Effort(profile_s=25.0, rounds=2, steps=3)
SHORT = Effort(profile_s=20.0, rounds=2, steps=1, stages=(1, 3))
