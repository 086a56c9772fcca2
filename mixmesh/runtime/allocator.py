"""Keeps the C library's heap from growing with every step.

PyTorch asks for aligned memory. Until glibc 2.38 a freed aligned piece often does not fit the next request of
the same size (glibc bug 14581), so activations of some megabytes, which come and go with every step, make the
heap grow with every step. Pieces of 8 MiB or more are therefore mapped directly from the kernel and go back
to it whole. With a limit of 2 MiB ranks would hold 30 to 70 MiB less, and the same in every run, but steps
would take up to 5 % longer, as their pages are new each time.

Free memory of the heap is returned between steps if the process holds more than the plan promised. That costs
page faults in the next step: little beside matrix products, up to half the time of elementwise operators.
Done at every step it makes a step of a small ResNet 1.4 times as long and lowers the peak by 2 % (``python
tests/memory_runs.py resnet-ddp-70-30``).
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from ..step.memory.ledger import OWN_PIECE_BYTES

KEPT_BYTES = 32 * 2**20  # bytes kept at the end of the heap within a step
SLACK = 1.1  # factor above the held memory within which a process counts as unchanged
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def steady_heap() -> bool:
    """Sets the limits above if the C library has the bug; returns whether it did."""
    if not grows():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, OWN_PIECE_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def trim_heap() -> None:
    """Returns free pieces of the heap to the kernel if the heap grows with every step."""
    if grows():
        give_back()


class HeapLimit:
    """Returns free pieces of the heap between steps when a process holds more than was planned.

    A process may hold other things as well, a data set for instance. If the next step exceeds the limit
    again, the process needs that much, and the limit is raised: returning memory at every step would only
    cost time, a fifth of a step of a small transformer (``python -m benchmarks compiled``).
    """

    def __init__(self, planned_bytes: int) -> None:
        self.limit_bytes = planned_bytes  # without a prediction it is 0, and nothing is returned
        self._has_just_trimmed = False

    def before_step(self) -> None:
        """Compares the memory of the process with the limit, and trims the heap or raises the limit."""
        if not self.limit_bytes or not grows():
            return
        held_bytes = resident_bytes()
        if held_bytes <= self.limit_bytes:
            self._has_just_trimmed = False
        elif self._has_just_trimmed:
            self.limit_bytes, self._has_just_trimmed = round(SLACK * held_bytes), False
        else:
            give_back()
            self.limit_bytes = max(self.limit_bytes, round(SLACK * resident_bytes()))
            self._has_just_trimmed = True


def give_back() -> None:
    """Returns the heap's free memory to the kernel, if the C library supports that."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@cache
def grows() -> bool:
    """Whether this C library has the bug and the user has not configured or replaced its allocator."""
    name, version = platform.libc_ver()
    chosen = any(key.startswith("MALLOC_") for key in os.environ) or "LD_PRELOAD" in os.environ
    return name == "glibc" and not chosen and tuple(map(int, version.split(".")[:2])) < (2, 38)
