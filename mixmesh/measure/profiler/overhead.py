"""Measures what the runtime itself does in a step: its checks, the exchange by which ranks agree on the
batch, the parallel model's node of autograd. A model of one number is trained, which leaves little else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ...frontend.trace.autocast import no_autocast
from ...lang.ir import (
    PARTIAL,
    REPLICATE,
    Instruction,
    Placement,
    Program,
    Ref,
    Shard,
    TensorType,
    ValueType,
    make_ratio,
)
from ...runtime.comm import Comm
from ...runtime.parallel import parallelize
from .limit import REST, Limit

FIRST_STEPS, STEPS = 3, 7


class OneNumber(nn.Module):
    """A model of one parameter, whose initial value takes no random number from the job."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).mean()


def data_parallelism(world_size: int) -> Program:
    """The program of data parallelism of ``OneNumber`` on two samples of the first rank and one of every
    other. With equal shares a whole batch could be one rank's rows of a larger one, and ranks would compare
    its values in every step."""
    rows = world_size + 1
    ratio = make_ratio([2.0, *[1.0] * (world_size - 1)])

    def typed(shape: tuple[int, ...], placement: Placement) -> TensorType:
        return TensorType(ValueType("f32", shape), placement, "r" if isinstance(placement, Shard) else None)

    cut = typed((rows, 1), Shard(0))
    instructions = (
        Instruction(("x",), (cut,), "input", ("x",)),
        Instruction(("weight",), (typed((1, 1), REPLICATE),), "param", ("weight",)),
        Instruction(("y",), (cut,), "aten.linear", (Ref("x"), Ref("weight"))),
        Instruction(("loss",), (typed((), PARTIAL),), "aten.mean", (Ref("y"),)),
    )
    return Program("one_number", world_size, (("r", ratio),), instructions, "loss")


def measure_overhead(
    comm: Comm, host_s: Mapping[str, tuple[float, float]], limit: Limit | None = None
) -> float:
    """CPU seconds of the computing thread in a step for what is neither an operator, a collective of the
    program nor the optimizer. ``host_s`` are those of the overlap. 0 on an accelerator, and if ``limit``
    leaves no time. Collective.

    What grows with the number of parameters, such as hooks, is left out, and so is the watch over the other
    ranks."""
    summed_s = host_s.get("all_reduce")
    if comm.world_size == 1 or comm.device.type != "cpu" or summed_s is None:
        return 0.0
    if limit is not None and limit.is_past(REST):
        return 0.0
    # within whatever contexts of the caller's script
    with no_autocast(), torch.enable_grad():
        own_s = step_s(comm) - 2 * summed_s[0]  # of the gradient, and of the loss
    return max(own_s, 0.0)


def step_s(comm: Comm) -> float:
    """The CPU seconds by which a step of ``OneNumber`` is longer in parallel than alone, its two sums
    included. Collective."""
    program = data_parallelism(comm.world_size)
    batch = torch.ones(comm.world_size + 1, 1, dtype=torch.float32, device=comm.device)
    alone = OneNumber(comm.device)
    parallel, _ = parallelize(
        OneNumber(comm.device),
        None,
        program,
        device=comm.device,
        timeout_s=comm.timeout_s,
        heartbeat_s=0.0,
        check_model=False,
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

    try:
        for _ in range(FIRST_STEPS):
            step()
            local_step()
        return cpu_s(step) - cpu_s(local_step)
    finally:
        parallel.comm.close()


def cpu_s(work: Callable[[], object]) -> float:
    """The median CPU seconds of this thread for ``work``. It leaves out the few steps in which ranks compare
    their parameters."""

    def once() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return statistics.median(once() for _ in range(STEPS))
