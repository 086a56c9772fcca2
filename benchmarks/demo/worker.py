"""One rank of the demo: first makes the profile of a case, then trains the same steps by PyTorch's own data
parallelism and by plans, taking turns, and finally measures a few steps of each in detail.

Taking turns in one process keeps the comparison valid while the speed of a shared machine drifts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.demo.cases import CASES, EVENLY, PLAN, SHARDED, SINGLE, Case
from benchmarks.demo.ddp import RecordedDDP
from benchmarks.torch_baselines import batch_size, fsdp, parallel_step, single_step
from mixmesh.base.timeline import save_trace, to_chrome_trace
from mixmesh.cluster import Cluster
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import even_ratio, shard_sizes
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.profiler import profile
from mixmesh.measure.testbed import enter_device
from mixmesh.planner import whole_counts
from mixmesh.runtime.comm import Comm, default_device, initialise, leave
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.job_data import endless
from mixmesh.runtime.optimizers import fuse
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.recording import Recorder, gather_steps, typical

DDP_BUCKET_MB = 4
RECORDED_STEPS = 2  # number of recorded steps; one more step shows where they begin
Span = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Variant:
    """A way to train. ``step`` runs a training step, opening the given span around its optimizer, and returns
    the global loss. Within the context ``recorded``, a recorder measures the steps."""

    step: Callable[[Span], float]
    recorded: Callable[[Recorder], AbstractContextManager]


def plain(name: str) -> AbstractContextManager:
    """The span of a step that is not measured."""
    return nullcontext()


def compare(case: Case, steps: int, plan_paths: dict[str, str], traces: Path) -> None:
    initialise(int(os.environ["WORLD_SIZE"]), default_device(), 300.0)
    plans = {name: Plan.load(path) for name, path in plan_paths.items() if name != EVENLY}
    variants = {EVENLY: ddp_steps(case)} | {name: baseline_steps(case, name) for name in case.baselines}
    for name, plan in plans.items():
        variants[name], comm = plan_steps(case, plan)
    alone = alone_step(case, plans[PLAN])
    enter_device()
    losses: dict[str, list[float]] = {name: [] for name in variants}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    speeds: list[float] = []
    per_round = -(-steps // case.rounds)
    for number in range(case.rounds):
        speeds.append(total(alone()))
        for name, variant in variants.items():
            for _ in range(min(per_round, steps - len(losses[name]))):
                dist.barrier()
                started = time.perf_counter()
                losses[name].append(variant.step(plain))
                seconds[name].append(slowest(time.perf_counter() - started))
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {case.rounds}", file=sys.stderr, flush=True)
    if case.is_recorded:
        variants[EVENLY] = recorded_ddp_steps(case)
        for name in (EVENLY, *plans):
            save_measured(variants[name], comm, traces / f"{name}-measured.json")
    if dist.get_rank() == 0:
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


def recorded_ddp_steps(case: Case) -> Variant:
    """DistributedDataParallel as in ``ddp_steps``, whose buckets report when they travel. It has made its
    first step, after which DDP forms its buckets."""
    made = case.make()
    model = RecordedDDP(made.model, DDP_BUCKET_MB)
    variant = ddp_variant(made, model.ddp, model.recorded)
    variant.step(plain)
    return variant


def ddp_steps(case: Case) -> Variant:
    """PyTorch's own DistributedDataParallel, equal batches."""
    made = case.make()
    model = nn.parallel.DistributedDataParallel(made.model, bucket_cap_mb=DDP_BUCKET_MB)
    return ddp_variant(made, model, lambda _: nullcontext())


def ddp_variant(made: Job, model: nn.Module, recorded: Callable) -> Variant:
    """Steps of data parallelism with equal batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = made.optimizer(model.parameters())
    fuse(optimizer)  # as in our plans
    size = batch_size(made) // world_size
    batches = endless(made.data, made.batch)

    def step(span: Span) -> float:
        batch = {k: v[rank * size : (rank + 1) * size] for k, v in next(batches).items()}
        loss = model(**batch)
        loss.backward()
        with span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return total(loss.item()) / world_size

    return Variant(step, recorded)


def baseline_steps(case: Case, name: str) -> Variant:
    """FSDP2 with equal batches, its parameters gathered once a step, or the fastest device alone."""
    made = case.make()
    if name == SINGLE:
        shares = [device.cpu_share for device in Cluster.parse(case.cluster).devices]
        step = single_step(made, shares.index(max(shares)))
    else:
        assert name == SHARDED
        step = parallel_step(made, partial(fsdp, False), evenly(made))
    return Variant(lambda span: step()(), lambda _: nullcontext())


def evenly(made: Job) -> tuple[int, ...]:
    """The number of samples per rank."""
    return whole_counts(even_ratio(dist.get_world_size()), batch_size(made))


def plan_steps(case: Case, plan: Plan) -> tuple[Variant, Comm]:
    """Steps of a plan, and the process groups that they use."""
    made = case.make()
    # several models share this process, so its memory must not be compared with this plan's prediction
    free = replace(plan, predicted_peak_memory_bytes=())
    optimizer = made.optimizer(made.model.parameters())
    model, optimizer = parallelize(made.model, optimizer, free, check_model=False)
    batches = shard_batches(endless(made.data, made.batch), plan, dist.get_rank())

    def step(span: Span) -> float:
        local, loss = model.forward_local(**next(batches))
        local.backward()
        with span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.wait())

    return Variant(step, model.recorded), model.comm


def alone_step(case: Case, plan: Plan) -> Callable[[], float]:
    """Samples per second of this device on its part of the batch, by the plan's first ratio, without
    communication."""
    made = case.make()
    batch, program = batch_size(made), plan.program
    count = max(1, shard_sizes(batch, program.ratios[0][1])[dist.get_rank()])
    part = {k: v[:count] for k, v in made.batch.items()}

    def run() -> float:
        dist.barrier()
        started = time.perf_counter()
        made.model(**part).backward()
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


def measure(case: Case, cluster_path: str, out: str) -> None:
    made = case.make()
    graph = trace(made.model, made.batch).graph
    cluster = Cluster.load(cluster_path)
    found = profile(graph, made, cluster, budget_s=case.profile_s, on_start=enter_device)
    if dist.get_rank() == 0:
        found.save(out)
    leave()


if __name__ == "__main__":
    what, case, *rest = sys.argv[1:]
    if what == "profile":
        measure(CASES[case], *rest)
    else:
        compare(CASES[case], int(rest[0]), json.loads(rest[1]), Path(rest[2]))
