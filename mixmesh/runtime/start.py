"""What ranks do together first: they compare what they were given, and begin to watch each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InputError, PlanError
from ..ir import Program
from ..units import size_text
from .agreement import disagreement, facts_of_start
from .comm import LEAST_S, RANK_VARIABLES, default_device, initialise
from .watch import Watch, watch_of_process


def start_together(
    model: nn.Module,
    plan: Any,
    *,
    seed: int,
    device: torch.device | str | None,
    timeout_s: float,
    heartbeat_s: float,
) -> Watch | None:
    """The watch of this process; None for a single one, or with ``heartbeat_s`` 0. Collective.

    Raises PlanError on all ranks if they were given different plans, models, code, seeds or versions, or if a
    device has less memory than the plan counts on.
    """
    if not dist.is_initialized() and not all(name in os.environ for name in RANK_VARIABLES):
        return None
    program = plan if isinstance(plan, Program) else plan.program
    micro_batches = None if isinstance(plan, Program) else plan.micro_batches
    where = torch.device(device) if device is not None else default_device()
    initialise(program.world_size, where, timeout_s)
    watch = watch_of_process(heartbeat_s) if heartbeat_s else None
    if watch is None:
        return None
    with watch.call("parallelize"):
        facts = facts_of_start(model, program, micro_batches, seed)
        if (error := disagreement(watch.exchange(facts, "parallelize", max(timeout_s, LEAST_S)))) is not None:
            raise error
        if where.type == "cuda" and not isinstance(plan, Program):
            _check_memory(plan, watch.rank, where)
    return watch


def check_values(model: nn.Module) -> None:
    """Raises InputError for a model whose tensors have no values to train from."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise InputError(
            "the model has no values: it was made on the device meta",
            expected="parameters and buffers with values, on all ranks",
            got=f"{len(empty)} of {len(tensors)} tensors on meta, the first is {empty[0]}",
            hint=(
                "make the model on the CPU; consume=True gives its memory back as it is cut",
                "or model.to_empty(device='cpu'), and load its weights before parallelize",
            ),
        )


def _check_memory(plan: Any, rank: int, device: torch.device) -> None:
    peaks = plan.predicted_peak_memory_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    if rank < len(peaks) and peaks[rank] > total:
        raise PlanError(
            f"rank {rank} was planned for a larger device",
            expected=f"{size_text(peaks[rank])} of memory",
            got=f"{torch.cuda.get_device_name(device)} with {size_text(total)}",
            hint="start the machines in the order of the cluster file, or plan for the cluster as it is",
        )


def meets(kind: str, unless: Callable[[Any], bool] = lambda model: False) -> Callable:
    """A method of a parallel model in which ranks meet, as the watch is to know it."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self, *args, **kwargs):
            if unless(self):
                return method(self, *args, **kwargs)
            with self.comm.call(kind):
                return method(self, *args, **kwargs)

        return run

    return decorate
