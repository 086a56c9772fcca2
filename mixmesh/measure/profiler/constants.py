"""Measures the memory of a process before any tensor of a job: the constant of the memory model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ...errors import MixmeshError
from ...runtime import collectives
from ...runtime.accelerator import allocated_bytes, outside_bytes, synchronize
from ...runtime.comm import Channel

SMALL_COUNT, LARGE_COUNT = 2**8, 2**21  # numbers per exchange

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
# as on every rank before its first step; the optimizer brings in modules of its own
torch.optim.AdamW(torch.nn.Linear(8, 8).parameters())
dist.all_reduce(torch.randn(4), group=group)
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


class ProcessMemory(NamedTuple):
    """Bytes that a process holds before any tensor of a job: while it computes nothing, and once it computes;
    and the bytes added by its first sum and its first all-to-all in a communicator of all ranks.
    ``communicator`` is empty if that takes no device memory."""

    idle: int
    working: int
    communicator: tuple[int, ...] = ()


@dataclass(frozen=True)
class KeptProcess:
    """The ``process_memory`` that an earlier profile left on this machine, and a way to keep a new one."""

    load: Callable[[], ProcessMemory | None]
    save: Callable[[ProcessMemory], object]


def own_process_memory(most_s: float, kept: KeptProcess | None = None) -> ProcessMemory | None:
    """Returns ``process_memory``, kept or measured; None if measuring takes more than ``most_s`` seconds."""
    if kept is not None and (before := kept.load()) is not None:
        return before
    try:
        memory = process_memory(max(most_s, 0.1))
    except MixmeshError as error:
        if isinstance(error.__cause__, subprocess.TimeoutExpired):
            return None
        raise
    if kept is not None:
        kept.save(memory)
    return memory


def process_memory(timeout_s: float = 120.0) -> ProcessMemory:
    """The largest resident size, measured as in ``runtime.train``, of a process that computes nothing, and of
    one that does everything that a rank on a CPU does, with tiny tensors.

    A new process, because this one has traced a model and holds memory for it. Call it before ``on_start``:
    it takes several seconds of one core. Raises MixmeshError if the process fails.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment, capture_output=True, text=True, timeout=timeout_s, check=True,
        )  # fmt: skip
        idle, working = map(int, ended.stdout.split()[-2:])
        return ProcessMemory(idle, working)
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        raise MixmeshError(
            "the memory of a process without tensors could not be measured",
            got=str(getattr(error, "stderr", "") or error).strip()[-300:],
            hint="python -c 'import torch, mixmesh.runtime.train' shows whether the libraries load",
        ) from error


def gpu_process_memory(channel: Channel) -> ProcessMemory:
    """The memory of a process on this card. Collective; the channel must not have been used before.

    The context, the kernels and workspaces that products, convolutions and attention bring with them, forward
    and backward, and the buffers of a communicator. Memory of other processes on the card counts too: a rank
    that shares a card has less of it.
    """
    device = channel.comm.device
    workspace_bytes = allocated_bytes(device)
    torch.zeros(1, device=device)
    alone = outside_bytes(device)
    sums = _added(device, lambda: _sum(channel))
    pairs = _added(device, lambda: _exchange(channel))
    kernels = _added(device, lambda: use_kernels(device))
    workspaces = allocated_bytes(device) - workspace_bytes
    return ProcessMemory(alone, alone + kernels + max(workspaces, 0), (sums, pairs))


def own_card_memory(device: torch.device) -> ProcessMemory:
    """The memory of a process on this card without communicators, if nothing has computed in it yet. Memory
    of other processes on the card counts too."""
    before = allocated_bytes(device)
    torch.zeros(1, device=device)
    alone = outside_bytes(device)
    kernels = _added(device, lambda: use_kernels(device))
    return ProcessMemory(alone, alone + kernels + max(allocated_bytes(device) - before, 0))


def _added(device: torch.device, work: Callable[[], object]) -> int:
    """The bytes outside of the allocator by which ``work`` increases the memory."""
    before = outside_bytes(device)
    work()
    synchronize(device)
    return max(outside_bytes(device) - before, 0)


def _sum(channel: Channel) -> None:
    """Makes sums and gathers of a few numbers and of many: each protocol and algorithm connects on first
    use."""
    for count in (SMALL_COUNT, LARGE_COUNT) if not channel.alone else ():
        x = torch.zeros(count, device=channel.comm.device)
        collectives.all_reduce(channel, x)
        collectives.all_gather(channel, x, [count] * len(channel.ranks))


def _exchange(channel: Channel) -> None:
    """Exchanges pieces of one size between all pairs."""
    if not channel.alone:
        pieces = [torch.zeros(LARGE_COUNT, device=channel.comm.device) for _ in channel.ranks]
        shapes = [(LARGE_COUNT,)] * len(pieces)
        collectives.exchange(channel, pieces, shapes, len(pieces) ** 2 * pieces[0].nbytes)


def use_kernels(device: torch.device) -> None:
    """Runs a product, a convolution and attention, forward and backward, and leaves no tensor."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 2, 64, 64, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(2, 2, 3, 3, device=device, dtype=dtype, requires_grad=True)
        y = F.scaled_dot_product_attention(x @ x.mT, x, x)
        F.conv2d(y, weight).square().mean().backward()
