"""A plain training loop over a plan, with what it measured."""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .data import shard_batches
from .parallel import parallelize

WARMUP_STEPS = 2  # not counted in the median: allocators and connections fill


@dataclass(frozen=True)
class RunReport:
    """``step_s`` per step on the slowest rank, global ``losses``, ``peak_memory_bytes`` per rank."""

    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]

    @property
    def step_s_median(self) -> float:
        return statistics.median(self.step_s[WARMUP_STEPS:] or self.step_s)


def endless(batches: Iterable | None, batch: Any) -> Iterator[Any]:
    """Batches without end: those of ``batches`` over and over, or ``batch`` itself."""
    if batches is None:
        return itertools.repeat(batch)
    if iter(batches) is batches:
        return iter(batches)  # an iterator runs once
    return itertools.chain.from_iterable(itertools.repeat(batches))


def default_optimizer(params: Iterable) -> torch.optim.Optimizer:
    """What a job without an optimizer gets."""
    return torch.optim.AdamW(params, lr=1e-3)


def train(
    job: Any,
    plan: Any,
    *,
    steps: int,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    seed: int = 0,
    on_start: Callable[[], object] = lambda: None,
    on_step: Callable[[int, float, float], object] = lambda step, loss, step_s: None,
) -> RunReport:
    """Trains ``job`` for ``steps`` steps as ``plan`` says. Collective.

    ``on_start`` is called by the computing thread when all is set up, before the first step; ``on_step``
    after each with its number, global loss and seconds.
    """
    model = job.model
    optimizer = (job.optimizer or default_optimizer)(model.parameters())
    parallel, optimizer = parallelize(model, optimizer, plan, device=device, timeout_s=timeout_s, seed=seed)
    comm = parallel.comm
    batches = shard_batches(endless(job.data, job.batch), parallel.program, comm.rank)
    on_start()
    dist.barrier()
    step_s: list[float] = []
    losses: list[float] = []
    for number in range(steps):
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        call = parallel.forward_local
        local, total = call(**batch) if isinstance(batch, dict) else call(*batch)
        local.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.wait()))
        step_s.append(time.perf_counter() - started)
        on_step(number, losses[-1], step_s[-1])
    return RunReport(slowest(step_s), tuple(losses), everyones(peak_memory_bytes(comm.device)))


def slowest(step_s: list[float]) -> tuple[float, ...]:
    """Per step, the seconds of the rank that took longest."""
    if not step_s:
        return ()
    times = torch.tensor(step_s, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        times = times.cuda()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return tuple(times.tolist())


def everyones(value: int) -> tuple[int, ...]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return tuple(values)


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU what the allocator held at most; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
