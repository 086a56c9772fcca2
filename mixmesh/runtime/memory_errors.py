"""Reports that a rank has run out of memory, to its user and to the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import DeviceLost
from .watch import running_watch

ALLOCATOR = "DefaultCPUAllocator"  # PyTorch's allocator on CPUs raises a RuntimeError that begins so


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a lack of memory: Python's own, or PyTorch's on a GPU or a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATOR in str(error) and "allocate memory" in str(error)


@contextmanager
def memory_errors_named() -> Iterator[None]:
    """A context that turns a lack of memory into DeviceLost, which names the rank, its device, the step and
    the place of the failed allocation, and informs the other ranks."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        watch = running_watch()
        name = "the device" if watch is None else watch.position.name(watch.rank)
        step = None if watch is None else watch.position.step
        lost = DeviceLost(
            f"{name} has run out of memory" + ("" if step is None else f" at step {step}"),
            got=" ".join(str(error).split())[:300] or type(error).__name__,
            hint=("end other programs that use the device's memory", "a smaller global batch"),
        )
        if watch is not None:
            watch.leave(lost)
        raise lost from error
