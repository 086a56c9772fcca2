"""The baselines, each as a planner: one program whose shares are given, in the best of its buckets."""

from __future__ import annotations

from collections.abc import Iterator

from ..lang.ir import even_ratio
from ..search.baselines import device_seconds, fully_sharded, only, tensor_parallel
from .passes import SEQUENCE
from .proposal import Proposal
from .task import Task


def single(task: Task) -> Iterator[Proposal]:
    """The fastest device, and the fastest with the most memory if that one is too small."""
    seconds = device_seconds(task.graph, task.costs, choices=task.choices)
    ranks = range(task.world_size)
    for rank in dict.fromkeys(
        (min(ranks, key=seconds.__getitem__), max(ranks, key=lambda r: (task.memory(r), -seconds[r])))
    ):
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
