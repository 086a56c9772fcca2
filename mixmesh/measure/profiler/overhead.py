"""Measures what the runtime itself does in a step: its checks, the exchange by which ranks agree on the
batch, the parallel model's node of autograd. A model of one number is trained, which leaves little else."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...frontend.trace.autocast import no_autocast
from ...lang.ir import Program, make_ratio, parse_program
from ...runtime.comm import Comm
from ...runtime.parallel import parallelize
from .limit import REST, Limit
from .meter import Meter

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
    rows, shares = world_size + 1, make_ratio([2.0, *[1.0] * (world_size - 1)])
    return parse_program(f"""program one_number world={world_size} {{
  ratio r = [{", ".join(map(repr, shares))}]
  %x = input("x") : f32[{rows}, 1] S(0)@r
  %weight = param("weight") : f32[1, 1] R
  %y = aten.linear(%x, %weight) : f32[{rows}, 1] S(0)@r
  %loss = aten.mean(%y) : f32[] P(sum)
  return %loss
}}
""")


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
        own_s = step_s(comm) - 2 * summed_s[0]  # gradient and loss
    return max(own_s, 0.0)


def step_s(comm: Comm) -> float:
    """The CPU seconds by which a step of ``OneNumber`` is longer in parallel than alone, its two sums
    included. Collective."""
    clock = Meter(comm.device, emulated=True)  # reads CPU time
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
        # medians leave out the few steps in which ranks compare their parameters
        both_s = [statistics.median(clock.once(work) for _ in range(STEPS)) for work in (step, local_step)]
        return both_s[0] - both_s[1]
    finally:
        parallel.comm.close()
