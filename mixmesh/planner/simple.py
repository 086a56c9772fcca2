"""The baselines, each as a planner: one program whose shares are given, in the best of its buckets."""

from __future__ import annotations

from collections.abc import Iterator

from ..lang.ir import even_ratio
from ..search.baselines import device_seconds, fully_sharded, only, tensor_parallel
from .passes import SEQUENCE
from .proposal import Proposal
from .task import Task

NEAR = 1.5  # one device alone may be the fastest though it seems to take so many times as long as another


def single(task: Task) -> Iterator[Proposal]:
    """A device of each class that may be the fastest alone, and the fastest with the most memory if these are
    too small."""
    costs = task.costs
    computing_s = device_seconds(task.graph, costs, choices=task.choices)
    seconds = [s + costs.optimizer_s(rank, task.gradient_bytes) for rank, s in enumerate(computing_s)]
    ranks = sorted(range(task.world_size), key=seconds.__getitem__)
    firsts = {costs.class_of[rank]: rank for rank in reversed(ranks)}
    near = [r for r in ranks if firsts[costs.class_of[r]] == r and seconds[r] <= NEAR * seconds[ranks[0]]]
    for rank in dict.fromkeys((*near, max(ranks, key=lambda r: (task.memory(r), -seconds[r])))):
        yield task.judge("single", task.data_parallel(only(rank, task.world_size)))


def ddp_even(task: Task) -> Iterator[Proposal]:
    yield task.best_buckets("ddp-even", task.data_parallel(even_ratio(task.world_size)))


def ddp_proportional(task: Task) -> Iterator[Proposal]:
    yield task.best_buckets("ddp-proportional", task.data_parallel(task.proportional))


def fsdp_even(task: Task) -> Iterator[Proposal]:
    yield task.judge("fsdp-even", fully_sharded(task.data_parallel(even_ratio(task.world_size))))


def tensor_parallel_proportional(task: Task) -> Iterator[Proposal]:
    """Tensor parallelism, with sequence parallelism if that is faster or the only one that fits."""
    program = tensor_parallel(task.graph, task.costs, task.proportional, task.units, task.choices)
    yield SEQUENCE(task, task.best_buckets("tensor-parallel", program), task.budget)
