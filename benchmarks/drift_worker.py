"""One rank of ``benchmarks drift``: profiles a job, or trains it and says when each step was over."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

from benchmarks import jobs
from benchmarks.measure import COLLECTIVE_TIMEOUT_S, measure_profile, print_from_rank_0
from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.frontend.job import optimizer_states
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.testbed import enter_device
from mixmesh.runtime.comm import default_device, initialise, leave
from mixmesh.runtime.train import train
from mixmesh.training.rebalance import RunBalancer, Solver


def train_steps(job: str, plan: str, cluster: str, profile: str, steps: str, is_rebalanced: str) -> None:
    """Trains as ``mixmesh run`` does, in these files' cluster and with their plan."""
    made, loaded = jobs.make(job), Plan.load(plan)
    initialise(loaded.program.world_size, default_device(), COLLECTIVE_TIMEOUT_S)
    said: list[str] = []
    states = optimizer_states(made.optimizer, made.model)
    solver = Solver(Cluster.load(cluster), Profile.load(profile), states)
    balancer = RunBalancer(solver, None, said.append) if int(is_rebalanced) else None

    def on_step(number: int, _loss: float, _step_s: float) -> None:
        print_from_rank_0({"step": number + 1, "at_s": time.monotonic()})

    train(
        made,
        loaded,
        steps=int(steps),
        timeout_s=COLLECTIVE_TIMEOUT_S,
        balancer=balancer,
        on_start=enter_device,
        on_step=on_step,
    )
    print_from_rank_0({"said": said, **({} if balancer is None else balancer.figures())})


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    {"profile": measure_profile, "train": train_steps}[command](*words)
    if dist.is_initialized():
        leave()
