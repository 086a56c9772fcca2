"""The two jobs of the demo: one for which two lines of a user's own code do as well as any plan, and one on
which the search wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks import jobs
from benchmarks.demo import job as gpt
from benchmarks.training_cases import CLUSTERS
from mixmesh.frontend.job import Job

CLUSTER = """\
name = "two boxes"
[network]
bandwidth_gbit_per_s = 1
latency_us = 50
[[machine]]
name = "a"
devices = [{ name = "cpu-70", cpu_share = 0.70 }, { name = "cpu-35", cpu_share = 0.35 }]
[[machine]]
name = "b"
devices = [{ name = "cpu-35", cpu_share = 0.35 }, { name = "cpu-18", cpu_share = 0.18 }]
"""
PLAN, EVENLY, PROPORTIONAL, SHARDED, SINGLE = "plan", "ddp-even", "ddp-proportional", "fsdp2-even", "single"
PLANNERS = {EVENLY: EVENLY, PROPORTIONAL: PROPORTIONAL, PLAN: "auto"}  # PyTorch's own DDP trains the first


@dataclass(frozen=True)
class Case:
    """A job on an emulated cluster. ``baselines`` are added to those of ``PLANNERS``. ``rounds`` is how often
    each variant takes its turn. ``is_recorded``: a few steps of each are measured in detail."""

    name: str
    about: str
    cluster: str
    make: Callable[[], Job]
    steps: int
    rounds: int
    profile_s: float
    baselines: tuple[str, ...]
    is_recorded: bool = False


GPT = Case(
    "gpt", "a GPT of 10.9 M parameters, 4 devices in 2 machines, 1 Gbit/s",
    CLUSTER, gpt.job, steps=6, rounds=3, profile_s=20.0, baselines=(SHARDED,), is_recorded=True,
)  # fmt: skip
WORDS = Case(
    "words", "8.8 M parameters, most of them 32768 words, 4 machines, 0.2 Gbit/s",
    CLUSTERS["four-boxes"], partial(jobs.make, "words"), steps=4, rounds=4, profile_s=12.0,
    baselines=(SHARDED, SINGLE),
)  # fmt: skip
CASES = {case.name: case for case in (GPT, WORDS)}
