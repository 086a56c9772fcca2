"""One rank of the demo: first the profile, then the same steps by DDP and by two plans, taking turns, and at
last a few steps of each with clocks around all that they do.

Taking turns in one process lets the comparison hold while the speed of a shared machine drifts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.demo.ddp import RecordedDDP
from mixmesh.demo.job import BATCH, job
from mixmesh.ir import shard_sizes
from mixmesh.job import Job
from mixmesh.plan_file import Plan
from mixmesh.profiler import profile
from mixmesh.runtime.comm import Comm, default_device, initialise, leave
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.optimizers import fuse
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.recording import Recorder, gather_steps, typical
from mixmesh.testbed import enter_device
from mixmesh.timeline import save_trace, to_chrome_trace
from mixmesh.trace import trace

ROUNDS = 5
DDP_BUCKET_MB = 4
EVENLY = "ddp-even"
RECORDED_STEPS = 2  # with clocks; a step more tells where they begin
Span = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Variant:
    """A way to train: ``step`` makes a step, its optimizer within a span, and gives the global loss;
    ``recorded`` has what it does measured by a recorder within a context."""

    step: Callable[[Span], float]
    recorded: Callable[[Recorder], AbstractContextManager]


def plain(name: str) -> AbstractContextManager:
    """The span of a step that nobody measures."""
    return nullcontext()


def compare(steps: int, plan_paths: dict[str, str], traces: Path) -> None:
    initialise(int(os.environ["WORLD_SIZE"]), default_device(), 300.0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plans = {name: Plan.load(path) for name, path in plan_paths.items()}
    variants = {EVENLY: ddp_steps(rank, world_size)}
    for name, plan in plans.items():
        variants[name], comm = plan_steps(plan)
    alone = alone_step(rank, plans["plan"])
    enter_device()
    losses: dict[str, list[float]] = {name: [] for name in variants}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    speeds: list[float] = []
    per_round = -(-steps // ROUNDS)
    for number in range(ROUNDS):
        speeds.append(total(alone()))
        for name, variant in variants.items():
            for _ in range(min(per_round, steps - len(losses[name]))):
                dist.barrier()
                started = time.perf_counter()
                losses[name].append(variant.step(plain))
                seconds[name].append(slowest(time.perf_counter() - started))
        if rank == 0:
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    variants[EVENLY] = recorded_ddp_steps(rank, world_size)
    for name, variant in variants.items():
        save_measured(variant, comm, traces / f"{name}-measured.json")
    if rank == 0:
        print(json.dumps({"losses": losses, "seconds": seconds, "samples_per_s": speeds}), flush=True)
    leave()


def save_measured(variant: Variant, comm: Comm, path: Path) -> None:
    """Measures a few steps in detail, and writes the one of median length. Collective."""
    recorder = Recorder(comm)
    with variant.recorded(recorder):
        dist.barrier()
        for _ in range(RECORDED_STEPS + 1):
            variant.step(recorder.span)
    measured = typical(gather_steps(recorder, comm, ()))
    if comm.rank == 0:
        save_trace(to_chrome_trace(measured, name="measured"), path)


def recorded_ddp_steps(rank: int, world_size: int) -> Variant:
    """DistributedDataParallel as in ``ddp_steps``, whose buckets tell when they travel. It has made its first
    step, after which DDP forms its buckets."""
    made = job()
    model = RecordedDDP(made.model, DDP_BUCKET_MB)
    variant = ddp_variant(made, model.ddp, rank, world_size, model.recorded)
    variant.step(plain)
    return variant


def ddp_steps(rank: int, world_size: int) -> Variant:
    """PyTorch's own DistributedDataParallel, equal batches."""
    made = job()
    model = nn.parallel.DistributedDataParallel(made.model, bucket_cap_mb=DDP_BUCKET_MB)
    return ddp_variant(made, model, rank, world_size, lambda _: nullcontext())


def ddp_variant(made: Job, model: nn.Module, rank: int, world_size: int, recorded: Callable) -> Variant:
    """Steps of data parallelism with equal batches."""
    optimizer = made.optimizer(model.parameters())
    fuse(optimizer)  # as in our plans
    size = BATCH // world_size
    batches = iter(made.data)

    def step(span: Span) -> float:
        batch = {k: v[rank * size : (rank + 1) * size] for k, v in next(batches).items()}
        loss = model(**batch)
        loss.backward()
        with span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return total(loss.item()) / world_size

    return Variant(step, recorded)


def plan_steps(plan: Plan) -> tuple[Variant, Comm]:
    """Steps of a plan, and the process groups that they use."""
    made = job()
    # several models share this process, so that its memory says nothing of this plan: none is promised
    free = replace(plan, predicted_peak_memory_bytes=())
    optimizer = made.optimizer(made.model.parameters())
    model, optimizer = parallelize(made.model, optimizer, free, check_model=False)
    batches = shard_batches(made.data, plan, dist.get_rank())

    def step(span: Span) -> float:
        local, loss = model.forward_local(**next(batches))
        local.backward()
        with span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.wait())

    return Variant(step, model.recorded), model.comm


def alone_step(rank: int, plan: Plan) -> Callable[[], float]:
    """Samples per second of this device alone on its part of the plan's batch: no communication."""
    made = job()
    count = max(1, shard_sizes(BATCH, plan.program.ratios[0][1])[rank])
    batch = {k: v[:count] for k, v in made.batch.items()}

    def run() -> float:
        dist.barrier()
        started = time.perf_counter()
        made.model(**batch).backward()
        made.model.zero_grad()
        return count / (time.perf_counter() - started)

    return run


def total(value: float) -> float:
    t = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(t)
    return t.item()


def slowest(value: float) -> float:
    t = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def measure(cluster_path: str, out: str, budget_s: float) -> None:
    made = job()
    graph = trace(made.model, made.batch).graph
    found = profile(graph, made, Cluster.load(cluster_path), budget_s=budget_s, on_start=enter_device)
    if dist.get_rank() == 0:
        found.save(out)
    leave()


if __name__ == "__main__":
    if sys.argv[1] == "profile":
        measure(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        compare(int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
