"""Measures what a process holds before any tensor of a job: the constant of the memory model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...cost.gpu_memory import GROUPS
from ...errors import MixmeshError
from ...runtime import collectives
from ...runtime.accelerator import allocated_bytes, outside_bytes, synchronize
from ...runtime.comm import Channel

# imports of ``mixmesh run``, a process group, and every library once: the matrix products and convolutions
# bring in their kernels with the first call
PROGRAM = """
import os
import typer
import torch
import torch.distributed as dist
import mixmesh.api, mixmesh.lang.check, mixmesh.frontend.job, mixmesh.measure.testbed
from mixmesh.runtime.train import peak_memory_bytes

from mixmesh.runtime.allocator import steady_heap

steady_heap()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group([0])
idle = peak_memory_bytes(torch.device("cpu"))
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.LazyLinear(64), torch.nn.GELU(), torch.nn.LayerNorm(64),
    torch.nn.Linear(64, 64),
)
images, tokens = torch.randn(4, 3, 16, 16), torch.randn(4, 2, 8, 16)
model(images)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    x = model(images).view(4, 2, 2, 16)
    x = torch.nn.functional.scaled_dot_product_attention(x, tokens, tokens)
    loss = torch.nn.functional.cross_entropy(x.flatten(1), torch.zeros(4, dtype=torch.int64))
    loss.backward()
    dist.all_reduce(model[0].weight.grad, group=group)
    optimizer.step()
    optimizer.zero_grad()
print(idle, peak_memory_bytes(torch.device("cpu")), flush=True)
os._exit(0)  # threads of process groups can end a process that is leaving with an error
"""


@dataclass(frozen=True)
class KeptProcess:
    """What this machine has kept of an earlier ``process_bytes``, and how to keep a new one."""

    load: Callable[[], tuple[int, int] | None]
    save: Callable[[tuple[int, int]], object]


def own_process_bytes(most_s: float, kept: KeptProcess | None = None) -> tuple[int, int]:
    """As ``process_bytes``, kept or measured; zeros where it takes more than ``most_s`` seconds."""
    if kept is not None and (known := kept.load()) is not None:
        return known
    try:
        sizes = process_bytes(max(most_s, 0.1))
    except MixmeshError as error:
        if isinstance(error.__cause__, subprocess.TimeoutExpired):
            return 0, 0
        raise
    if kept is not None:
        kept.save(sizes)
    return sizes


def process_bytes(timeout_s: float = 120.0) -> tuple[int, int]:
    """The largest resident size, as ``runtime.train`` measures it, of a process that computes nothing, and
    of one that does all that a rank on a CPU does, with tiny tensors.

    A new process, because this one has traced a model and holds what that takes. Call it before
    ``on_start``: it is several seconds of one core. Raises MixmeshError if the process fails.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment, capture_output=True, text=True, timeout=timeout_s, check=True,
        )  # fmt: skip
        idle, working = map(int, ended.stdout.split()[-2:])
        return idle, working
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        raise MixmeshError(
            "the memory of a process without tensors could not be measured",
            got=str(getattr(error, "stderr", "") or error).strip()[-300:],
            hint="python -c 'import torch, mixmesh.runtime.train' shows whether the libraries load",
        ) from error


def gpu_process_bytes(channel: Channel) -> tuple[int, int]:
    """Bytes of the card that a process holds that computes nothing, and one that computes, before any tensor
    of a job. Collective.

    The context, ``GROUPS`` times what a first collective adds (a communicator's buffers), and the kernels and
    workspaces that products, convolutions and attention bring with them, forward and backward. What other
    processes hold of the card counts too: who shares it has less.
    """
    device = channel.comm.device
    made = allocated_bytes(device)
    torch.zeros(1, device=device)
    alone = outside_bytes(device)
    if not channel.alone:
        collectives.all_reduce(channel, torch.zeros(2**20, device=device))
    synchronize(device)
    group = outside_bytes(device) - alone
    use_kernels(device)
    synchronize(device)
    kernels = outside_bytes(device) - alone - group
    workspaces = allocated_bytes(device) - made
    idle = alone + GROUPS * max(group, 0)
    return idle, idle + max(kernels, 0) + max(workspaces, 0)


def use_kernels(device: torch.device) -> None:
    """A product, a convolution and attention, forward and backward, which leave no tensor."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 2, 64, 64, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(2, 2, 3, 3, device=device, dtype=dtype, requires_grad=True)
        y = F.scaled_dot_product_attention(x @ x.mT, x, x)
        F.conv2d(y, weight).square().mean().backward()
