"""One rank of ``python -m benchmarks poplar``: profiles, or makes training runs one after the other.

Every run is a separate child process, as under ``mixmesh run``, within its device's CPU quota and memory
limit. So its memory is its own, and after a run that runs out of memory the next one still starts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import jobs
from benchmarks.measure import measure_profile
from mixmesh.frontend.job import batch_size
from mixmesh.lang.ir import even_ratio, shard_sizes
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.profiler.children import in_child
from mixmesh.measure.testbed import enter_device
from mixmesh.runtime.comm import default_device, initialise, leave
from mixmesh.runtime.train import peak_memory_bytes, train

RUN_S = 90.0  # limit of a run
COLLECTIVE_TIMEOUT_S = 45.0
BUCKET_MB = 4


def measure_runs(runs_path: str, folder: str) -> None:
    """Makes the runs in a file of rows (name, job, steps, what), where ``what`` is the path of a plan, or
    ``ddp`` or ``fsdp``. Each rank writes the outcomes of its runs, in order, to a file in ``folder``."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    outcomes = []
    for number, (name, job, steps, what) in enumerate(json.loads(Path(runs_path).read_text())):
        if rank == 0:
            print(name, file=sys.stderr, flush=True)
        run = partial(one_run, job, steps, what, port + number)
        outcomes.append(asdict(in_child(run, RUN_S)))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(outcomes))


def one_run(job: str, steps: int, what: str, port: int) -> dict | None:
    """Seconds of each step on the slowest rank, losses, and this rank's peak of memory in bytes. None for a
    rank that the plan has no place for: its cluster is the first machines of this one."""
    os.environ["MASTER_PORT"] = str(port)
    if what in BASELINES:
        return torch_run(job, steps, what)
    plan = Plan.load(what)
    rank, world_size = int(os.environ["RANK"]), plan.program.world_size
    if rank >= world_size:
        return None
    os.environ["WORLD_SIZE"] = str(world_size)
    report = train(jobs.make(job), plan, steps=steps, timeout_s=COLLECTIVE_TIMEOUT_S, on_start=enter_device)
    return {
        "step_s": report.step_s,
        "losses": report.losses,
        "peak_bytes": report.peak_memory_bytes[rank],
    }


def torch_run(job: str, steps: int, what: str) -> dict:
    """PyTorch's own data parallelism on equal batches. Its modules are imported only here."""
    from benchmarks.torch_baselines import parallel_step

    initialise(int(os.environ["WORLD_SIZE"]), default_device(), COLLECTIVE_TIMEOUT_S)
    made = jobs.make(job)
    counts = shard_sizes(batch_size(made.batch), even_ratio(dist.get_world_size()))
    step = parallel_step(made, BASELINES[what], counts)
    enter_device()
    step_s, losses = [], []
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        losses.append(step()())
        step_s.append(time.perf_counter() - started)
    slowest = torch.tensor(step_s, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {
        "step_s": slowest.tolist(),
        "losses": losses,
        "peak_bytes": peak_memory_bytes(default_device()),
    }


def ddp(model: torch.nn.Module, group: dist.ProcessGroup | None) -> torch.nn.Module:
    from benchmarks.torch_baselines import ddp as wrap

    return wrap(BUCKET_MB, model, group)


def fsdp(model: torch.nn.Module, group: dist.ProcessGroup | None) -> torch.nn.Module:
    from benchmarks.torch_baselines import fsdp as wrap

    return wrap(True, model, group)


BASELINES: dict[str, Callable[..., torch.nn.Module]] = {"ddp": ddp, "fsdp": fsdp}

if __name__ == "__main__":
    {"profile": measure_profile, "runs": measure_runs}[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        leave()
