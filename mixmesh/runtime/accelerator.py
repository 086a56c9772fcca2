"""The device of this process as seen by its driver and PyTorch's allocator: CUDA, ROCm (which PyTorch calls
``cuda``), XPU, or a CPU, for which there is nothing to do.

Uses ``torch.accelerator``, which covers all kinds of devices, and the device's own module
(``torch.get_device_module``) for calls that this lacks. Streams and events are in ``streams``, random numbers
in ``device_random``, casts in ``frontend.trace.autocast``, fused optimizers in ``frontend.job.optimizers``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

HOST = ("cpu", "meta")  # types of devices whose work is done when a call returns
HOST_BACKEND = "gloo"  # a backend that sends from host memory, to which every tensor is copied first
TF32_CAPABILITY = (8, 0)  # Ampere
UNNAMED_BACKEND = "undefined"  # PyTorch's name for a group with a backend for each type of device
PRETENDED_BACKEND = "fake"  # PyTorch's backend for one process that behaves as if all others were there


@dataclass(frozen=True)
class CardFacts:
    """Figures of a device, from its driver. ``uuid`` is empty if the driver gives none."""

    name: str
    memory_bytes: int
    uuid: str


def is_accelerator(device: torch.device) -> bool:
    """Whether calls only issue work to the device, which does it later, in its own streams."""
    return device.type not in HOST


@cache
def accelerator_type() -> str | None:
    """The type of this machine's devices if they have a collective backend of their own. None on a machine
    with only CPUs, and for a Mac's GPU, which has no backend."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or device_backend(current) == HOST_BACKEND:
        return None
    return current.type


def device_backend(device: torch.device) -> str:
    """The backend whose collectives take tensors of the device: NCCL on CUDA and ROCm, XCCL on XPU."""
    return dist.Backend.default_device_backend_map.get(device.type, HOST_BACKEND)


def is_on_device(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the collectives of a group (by default the default group) run in a stream of the device;
    ``wait`` then blocks the current stream rather than the thread."""
    return backend_of(group) not in (HOST_BACKEND, PRETENDED_BACKEND)


def backend_of(group: dist.ProcessGroup | None = None) -> str:
    """The backend of a group (by default the default group) for tensors of this machine's devices. A group
    that was made without a backend, as by the Trainer and Accelerate, has one for each type of device."""
    backend = dist.get_backend(group)
    if backend != UNNAMED_BACKEND:
        return backend
    kind = accelerator_type()
    return HOST_BACKEND if kind is None else device_backend(torch.device(kind))


def device_count() -> int:
    """The number of this machine's devices visible to this process; 0 if there are only CPUs."""
    return 0 if accelerator_type() is None else torch.accelerator.device_count()


def local_device() -> torch.device:
    """The device of this process. A launcher's processes on a machine take its devices in turn, and share
    them if there are more processes than devices; without devices it is the CPU."""
    kind = accelerator_type()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % device_count())


def indexed(device: torch.device | str) -> torch.device:
    """The device with its index. A thread's device cannot be set to plain ``cuda``, which also compares
    unequal to ``cuda:0``. Under a launcher it is this process's own device, elsewhere the current one."""
    device = torch.device(device)
    if not is_accelerator(device) or device.index is not None:
        return device
    local = os.environ.get("LOCAL_RANK")
    if local is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device(device.type, int(local) % max(torch.accelerator.device_count(), 1))


def card_facts(device: torch.device) -> CardFacts:
    """Name, memory and uuid of an accelerator."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return CardFacts(properties.name, properties.total_memory, str(getattr(properties, "uuid", "")))


def device_name(device: torch.device) -> str:
    """The driver's name for the device."""
    return card_facts(device).name if is_accelerator(device) else "a CPU"


def computes_bf16(device: torch.device) -> bool:
    """Whether an accelerator itself computes in bf16. CUDA also accepts bf16 on cards before Ampere, and
    converts every number."""
    module = torch.get_device_module(device)
    if device.type == "cuda":
        return module.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 in torch.accelerator.get_device_capability(device)["supported_dtypes"]


def computes_tf32(device: torch.device) -> bool:
    """Whether products of float32 may be computed in TF32, which NVIDIA's cards from Ampere on can do."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.get_device_module(device).get_device_capability(device) >= TF32_CAPABILITY


def reaches(device: torch.device, other: int) -> bool:
    """Whether a device reads and writes the memory of the ``other`` one, given by its index, without the
    host."""
    module = torch.get_device_module(device)
    return hasattr(module, "can_device_access_peer") and module.can_device_access_peer(device, other)


def backend_version(device: torch.device) -> str:
    """The version of a device's collective library (NCCL, or RCCL on ROCm); empty if it has none or reports
    no version."""
    if device_backend(device) != "nccl" or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.get_device_module(device).nccl.version()))


def take(device: torch.device) -> None:
    """Makes ``device`` the current device of the calling thread; every thread has its own."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device | None = None) -> None:
    """Waits until everything that was issued to the device has been done; by default to the accelerator of
    the calling thread. Does nothing for a CPU, whose work is done when a call returns."""
    if device is None or is_accelerator(device):
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Returns the allocator's unused memory to the driver."""
    if is_accelerator(device):
        torch.accelerator.memory.empty_cache()


def begin_peak(device: torch.device) -> None:
    """Makes memory peaks count from here on."""
    torch.zeros(1, device=device)  # there is no allocator before the first tensor
    torch.accelerator.memory.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The largest number of bytes of tensors held at one time, including workspaces of cuBLAS."""
    return torch.accelerator.memory.max_memory_allocated(device)


def peak_held_bytes(device: torch.device) -> int:
    """The card's peak bytes held by this process: the allocator's reserved segments at their peak, plus the
    memory outside of it (context, kernels, NCCL's buffers) as it is now. Memory of other processes on the
    card counts as outside."""
    return torch.accelerator.memory.max_memory_reserved(device) + outside_bytes(device)


def outside_bytes(device: torch.device) -> int:
    """Bytes of the card in use that do not belong to this process's allocator."""
    free, total = torch.accelerator.memory.get_memory_info(device)
    return total - free - torch.accelerator.memory.memory_reserved(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of the current tensors and workspaces."""
    return torch.accelerator.memory.memory_allocated(device)
