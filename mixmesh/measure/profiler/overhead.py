"""Measures what the runtime itself does in a step: its checks, the exchange by which ranks agree on the
batch, the parallel model's node of autograd. A model of one number is trained, which leaves little else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ...lang.ir import (
    PARTIAL,
    REPLICATE,
    Instruction,
    Program,
    Ref,
    Shard,
    TensorType,
    ValueType,
    even_ratio,
)
from ...runtime.comm import Comm
from ...runtime.parallel import parallelize
from .limit import OPERATORS, Limit

FIRST_STEPS, STEPS = 3, 7  # a median leaves out the few steps in which ranks compare their parameters


class OneNumber(nn.Module):
    """A model of one parameter, whose initial value takes no random number from the job."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).mean()


def data_parallelism(world_size: int) -> Program:
    """The program of data parallelism of ``OneNumber`` on one sample per rank."""

    def typed(shape: tuple[int, ...], placement) -> TensorType:
        return TensorType(ValueType("f32", shape), placement, "r" if isinstance(placement, Shard) else None)

    rows, weight, total = (world_size, 1), typed((1, 1), REPLICATE), typed((), PARTIAL)
    cut = typed(rows, Shard(0))
    instructions = (
        Instruction(("x",), (cut,), "input", ("x",)),
        Instruction(("weight",), (weight,), "param", ("weight",)),
        Instruction(("y",), (cut,), "aten.linear", (Ref("x"), Ref("weight"))),
        Instruction(("loss",), (total,), "aten.mean", (Ref("y"),)),
    )
    return Program("one_number", world_size, (("r", even_ratio(world_size)),), instructions, "loss")


def measure_overhead(
    comm: Comm, host_s: Mapping[str, tuple[float, float]], limit: Limit | None = None
) -> float:
    """CPU seconds of the computing thread in a step for what is neither an operator, a collective of the
    program nor the optimizer; 0 on an accelerator. ``host_s`` are those of the overlap. Collective."""
    if comm.world_size == 1 or comm.device.type != "cpu" or (limit is not None and limit.is_past(OPERATORS)):
        return 0.0
    batch, alone = torch.ones(comm.world_size, 1), OneNumber()
    parallel, _ = parallelize(
        OneNumber(), None, data_parallelism(comm.world_size), check_model=False, heartbeat_s=0.0
    )

    def step() -> None:
        loss, total = parallel.forward_local(batch)
        loss.backward()
        assert total is not None  # it computes a loss
        total.wait()
        parallel.zero_grad()

    def local_step() -> None:
        alone(batch).backward()
        alone.zero_grad()

    for _ in range(FIRST_STEPS):
        step()
        local_step()
    step_s, local_s = (cpu_s(work) for work in (step, local_step))
    parallel.comm.close()
    summed_s, _ = host_s.get("all_reduce", (0.0, 0.0))
    return max(step_s - local_s - 2 * summed_s, 0.0)  # of the gradient, and of the loss


def cpu_s(work: Callable[[], object]) -> float:
    """The median CPU seconds of this thread for ``work``."""

    def once() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return statistics.median(once() for _ in range(STEPS))
