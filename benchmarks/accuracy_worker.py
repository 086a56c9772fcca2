"""One rank of ``python -m benchmarks accuracy``: profiles, or times several plans in turn.

Plans take turns in one process, so that the comparison holds while the speed of a shared machine drifts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from benchmarks.measure import (
    COLLECTIVE_TIMEOUT_S,
    LOCAL_STEPS,
    everyones_local_s,
    local_step,
    measure_profile,
    plan_step,
    print_from_rank_0,
    slowest,
)
from mixmesh.cluster import Cluster
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.testbed import enter_device
from mixmesh.runtime.comm import default_device, initialise, leave

ROUNDS = 4
PLAN_S = 10.0  # seconds for which every plan is timed, about
MAX_STEPS = 5  # steps in a measured round, after a first one that does not count


def profile_and_local_steps(job: str, cluster: str, out: str, budget_s: str) -> None:
    """Profiles, and prints seconds of a local step by rank, from the same minute."""
    measure_profile(job, cluster, out, budget_s)
    print_from_rank_0(everyones_local_s(local_step(job, Cluster.load(cluster)), LOCAL_STEPS))


def measure_times(job: str, cluster: str, paths: str) -> None:
    """Prints seconds of a step by plan and round, and of a local step by round and rank."""
    initialise(int(os.environ["WORLD_SIZE"]), default_device(), COLLECTIVE_TIMEOUT_S)
    steps = {name: plan_steps(job, Plan.load(path)) for name, path in json.loads(paths).items()}
    local = local_step(job, Cluster.load(cluster))
    enter_device()
    count = {name: steps_of_a_round(step) for name, step in steps.items()}
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    local_s = []
    for _ in range(ROUNDS):
        local_s.append(everyones_local_s(local, LOCAL_STEPS // 2))
        for name, step in steps.items():
            dist.barrier()
            step()
            step_s[name].append(slowest(step, count[name])[0])
    print_from_rank_0({"step_s": step_s, "local_s": local_s})


def steps_of_a_round(step: Callable[[], object]) -> int:
    step()
    return max(1, min(MAX_STEPS, round(PLAN_S / ROUNDS / slowest(step, 1)[0]) - 1))


def plan_steps(job: str, plan: Plan) -> Callable[[], object]:
    """Steps that end when the global loss is known."""
    step = plan_step(job, plan)
    return lambda: step()()


if __name__ == "__main__":
    {"profile": profile_and_local_steps, "times": measure_times}[sys.argv[1]](*sys.argv[2:])
    leave()
