"""One rank of ``mixmesh bench accuracy``: profiles, times several plans in turn, or measures one's memory.

Plans take turns in one process, so that the comparison holds while the speed of a shared machine drifts;
memory needs a process per plan.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mixmesh.bench import jobs
from mixmesh.cluster import Cluster
from mixmesh.plan_file import Plan
from mixmesh.profiler import profile
from mixmesh.runtime.comm import default_device, initialise
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.train import endless, train
from mixmesh.testbed import enter_device
from mixmesh.trace import trace

ROUNDS = 4
PLAN_S = 10.0  # about so long every plan is timed
MAX_STEPS = 5  # of a round that count; one before them does not
MEMORY_STEPS = 4
TIMEOUT_S = 120.0


def measure_profile(job: str, cluster: str, out: str, budget_s: str) -> None:
    made = getattr(jobs, job)()
    graph = trace(made.model, made.batch).graph
    found = profile(graph, made, Cluster.load(cluster), budget_s=float(budget_s), on_start=enter_device)
    if dist.get_rank() == 0:
        found.save(out)


def measure_times(job: str, paths: str) -> None:
    initialise(int(os.environ["WORLD_SIZE"]), default_device(), TIMEOUT_S)
    steps = {name: plan_steps(job, Plan.load(path)) for name, path in json.loads(paths).items()}
    enter_device()
    count = {name: steps_of_a_round(step) for name, step in steps.items()}
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            step()
            step_s[name].append(slowest(step, count[name]))
    if dist.get_rank() == 0:
        print(json.dumps(step_s), flush=True)


def steps_of_a_round(step: Callable[[], object]) -> int:
    step()
    return max(1, min(MAX_STEPS, round(PLAN_S / ROUNDS / slowest(step, 1)) - 1))


def slowest(step: Callable[[], object], count: int) -> float:
    """Seconds of a step, ``count`` of them in a row, on the rank that takes longest."""
    started = time.perf_counter()
    for _ in range(count):
        step()
    seconds = torch.tensor((time.perf_counter() - started) / count, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def plan_steps(job: str, plan: Plan) -> Callable[[], object]:
    """Steps as ``mixmesh run`` makes them."""
    made = getattr(jobs, job)()
    model, optimizer = parallelize(
        made.model, made.optimizer(made.model.parameters()), plan, timeout_s=TIMEOUT_S
    )
    batches = shard_batches(endless(made.data, made.batch), plan.program, dist.get_rank())

    def step() -> float:
        local, loss = model.forward_local(**next(batches))
        local.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.wait())

    return step


def measure_memory(job: str, path: str) -> None:
    report = train(getattr(jobs, job)(), Plan.load(path), steps=MEMORY_STEPS, timeout_s=TIMEOUT_S)
    if dist.get_rank() == 0:
        print(json.dumps(report.peak_memory_bytes), flush=True)


if __name__ == "__main__":
    {"profile": measure_profile, "times": measure_times, "memory": measure_memory}[sys.argv[1]](*sys.argv[2:])
    dist.barrier()
    dist.destroy_process_group()
