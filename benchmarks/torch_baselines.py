"""PyTorch's own data parallelism, as a user would set it up: DDP and FSDP2, and a single device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mixmesh.frontend.job import Job
from mixmesh.lang.ir import even_ratio, make_ratio
from mixmesh.planner import whole_counts
from mixmesh.runtime.first_rank import everyones
from mixmesh.runtime.job_data import endless
from mixmesh.runtime.optimizers import fuse

Loss = Callable[[], float]  # the global loss of a step that was made; collective
Step = Callable[[], Loss]
SPEED_TURNS = 2  # a device's speed depends on its batch, so it is measured again at the first result
SPEED_STEPS = 3


@dataclass(frozen=True)
class Baseline:
    """A baseline with one of the settings that a user would try; the better setting counts."""

    name: str
    setting: str
    proportional: bool
    wrap: Callable[[nn.Module, Group], nn.Module]

    def __str__(self) -> str:
        return f"{self.name}, {self.setting}"


Group = dist.ProcessGroup | None  # None: all ranks


def ddp(bucket_mb: int, model: nn.Module, group: Group = None) -> nn.Module:
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )


def fsdp(reshard: bool, model: nn.Module, _: Group = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that keeps them in a list, at any depth; otherwise its children."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    inner = {id(m) for outer in lists for m in outer.modules() if m is not outer}
    lists = [m for m in lists if id(m) not in inner]
    return [block for found in lists for block in found] or list(model.children())


BASELINES = tuple(
    Baseline(name, f"buckets of {size} MB", name == "ddp-proportional", partial(ddp, size))
    for name in ("ddp-even", "ddp-proportional")
    for size in (4, 25)
) + tuple(
    Baseline("fsdp-even", setting, False, partial(fsdp, reshard))
    for setting, reshard in (("gathered twice", True), ("gathered once", False))
)
# DDP on a single machine, in proportion to the speeds of its devices
ON_ONE_MACHINE = tuple(
    Baseline("machine", f"buckets of {size} MB", True, partial(ddp, size)) for size in (4, 25)
)


def parallel_step(job: Job, wrap: Callable[[nn.Module, Group], nn.Module], counts: Sequence[int]) -> Step:
    """Steps on ``counts`` samples per rank; ranks without samples take no part. Collective.

    Both DDP and FSDP average gradients over ranks; the loss of a rank is scaled by its share of the batch
    times the number of ranks, so that the average is the gradient of the whole batch.
    """
    rank, ranks = dist.get_rank(), [r for r, count in enumerate(counts) if count]
    group = None if len(ranks) == dist.get_world_size() else dist.new_group(ranks)
    if rank not in ranks:
        return lambda: lambda: total(0.0)
    share = counts[rank] / sum(counts)
    first = sum(counts[:rank])
    model = wrap(job.model, group)
    optimizer = job.optimizer(model.parameters())
    fuse(optimizer)  # as in our plans
    batches = endless(job.data, job.batch)

    def step() -> Loss:
        batch = cut(next(batches), first, counts[rank])
        loss = model(**batch)
        (loss * (share * len(ranks))).backward()
        optimizer.step()
        optimizer.zero_grad()
        return lambda: total(loss.item() * share)

    return step


def single_step(job: Job, rank: int) -> Step:
    """Steps of the whole batch on one rank, while the others have nothing to do."""
    optimizer = job.optimizer(job.model.parameters())
    fuse(optimizer)
    batches = endless(job.data, job.batch)

    def step() -> Loss:
        if dist.get_rank() != rank:
            return lambda: total(0.0)
        loss = job.model(**next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return lambda: total(loss.item())

    return step


def counts_on_one_machine(
    machines: Sequence[Sequence[int]], speeds: Sequence[float], batch: int
) -> tuple[int, ...] | None:
    """Samples per rank if only the fastest of ``machines`` (each a list of ranks) has any; None if that one
    has a single device, which is a separate baseline."""
    fastest = max(machines, key=lambda ranks: sum(speeds[r] for r in ranks))
    if len(fastest) < 2 or len(machines) < 2:
        return None
    alone = [speed if r in fastest else 0.0 for r, speed in enumerate(speeds)]
    return whole_counts(make_ratio(alone), batch)


def measured_speeds(job: Job) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(samples per rank in proportion to measured speeds, the speeds in samples per second).

    Collective: all ranks compute at the same time, forward and backward.
    """
    size, world_size = batch_size(job), dist.get_world_size()
    counts = whole_counts(even_ratio(world_size), size)
    speeds: tuple[float, ...] = ()
    for _ in range(SPEED_TURNS):
        mine = cut(job.batch, 0, counts[dist.get_rank()])

        def step(batch=mine) -> None:
            job.model(**batch).backward()

        step()
        dist.barrier()
        seconds = own_seconds(step)
        speeds = everyones(counts[dist.get_rank()] / seconds)
        counts = whole_counts(make_ratio(speeds), size)
    job.model.zero_grad()
    return counts, speeds


def own_seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(SPEED_STEPS):
        step()
    return (time.perf_counter() - started) / SPEED_STEPS


def cut(batch, first: int, count: int) -> dict[str, torch.Tensor]:
    return {name: tensor[first : first + count] for name, tensor in batch.items()}


def batch_size(job: Job) -> int:
    return next(iter(job.batch.values())).shape[0]


def total(value: float) -> float:
    summed = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(summed)
    return summed.item()
