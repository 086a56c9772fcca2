"""The device of this process as its driver and PyTorch's allocator see it: CUDA, ROCm, or a CPU, where there
is nothing to do.

By ``torch.accelerator``, which has one call for every kind of device.
"""

from __future__ import annotations

import os

import torch

HOST = ("cpu", "meta")  # devices of which nothing is to be awaited


def indexed(device: torch.device | str) -> torch.device:
    """The device with its index: ``cuda`` is no device that a thread can be set to, and is unlike ``cuda:0``
    in comparisons. Under a launcher it is this process's own, elsewhere the current one."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    local = os.environ.get("LOCAL_RANK")
    if local is None:
        return torch.device("cuda", torch.accelerator.current_device_index())
    return torch.device("cuda", int(local) % max(torch.accelerator.device_count(), 1))


def take(device: torch.device) -> None:
    """Makes the device that of the calling thread: every thread has one of its own."""
    if device.type not in HOST:
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Waits until all that was issued to the device is done; on a CPU it is when it was called."""
    if device.type not in HOST:
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Gives what the allocator holds and nobody uses back to the driver."""
    if device.type not in HOST:
        torch.accelerator.memory.empty_cache()


def begin_peak(device: torch.device) -> None:
    """Has peaks count from here on."""
    torch.zeros(1, device=device)  # there is no allocator before the first tensor
    torch.accelerator.memory.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of tensors that there were at once, workspaces of cuBLAS among them."""
    return torch.accelerator.memory.max_memory_allocated(device)


def peak_held_bytes(device: torch.device) -> int:
    """The most bytes of the card that this process held at once: segments of the allocator, with what it
    loses between tensors, and all that is outside of it (context, kernels, NCCL's buffers), as it is now.
    What other processes hold of the card counts as outside."""
    return torch.accelerator.memory.max_memory_reserved(device) + outside_bytes(device)


def outside_bytes(device: torch.device) -> int:
    """Bytes of the card in use that are not of this process's allocator."""
    free, total = torch.accelerator.memory.get_memory_info(device)
    return total - free - torch.accelerator.memory.memory_reserved(device)
