"""The C library's heap, kept from growing with every step.

PyTorch asks for aligned memory. Until glibc 2.38 a freed aligned piece often does not fit the next request
of the same size (glibc bug 14581), so that activations of some megabytes, which come and go with every
step, make the heap grow with every step. Large pieces of their own from the kernel go back whole: from
8 MiB on. From 2 MiB on ranks would hold 30 to 70 MiB less, and the same in every run, for 0 to 5 % more of a
step: pages that are new each time. Free memory of the heap is given back between steps, where the process
holds more than the plan promised: that costs page faults at the next step, little beside matrix products, and
up to half the time of elementwise operators. A step of a small ResNet takes 1.4 times as long if that is done
at every step, and peaks are 2 % lower (``python tests/memory_runs.py resnet-ddp-70-30``).
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from ..step.memory.ledger import OWN_PIECE_BYTES

KEPT_BYTES = 32 * 2**20  # at the end of the heap, within a step
SLACK = 1.1  # times what a process holds, until it counts as more
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def steady_heap() -> bool:
    """Sets the limits above where they help; whether it did."""
    if not grows():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, OWN_PIECE_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def trim_heap() -> None:
    """Gives the free pieces of the heap back, where it grows."""
    if grows():
        give_back()


class HeapLimit:
    """Gives free pieces of the heap back between steps where a process holds more than was planned.

    A process may hold other things as well, a data set for instance. If the next step takes it over the
    limit again, that is what it needs, and the limit follows: giving back at every step would only cost
    time, a fifth of a step of a small transformer (``python -m benchmarks compiled``).
    """

    def __init__(self, planned_bytes: int) -> None:
        self.limit_bytes = planned_bytes  # 0 where nothing is planned: nothing is given back
        self._has_just_trimmed = False

    def before_step(self) -> None:
        """Looks at what the process holds."""
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
    """Gives what is free in the heap back to the kernel, where the C library can."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@cache
def grows() -> bool:
    """Whether this C library has the bug, and nobody has chosen how it is to behave."""
    name, version = platform.libc_ver()
    chosen = any(key.startswith("MALLOC_") for key in os.environ) or "LD_PRELOAD" in os.environ
    return name == "glibc" and not chosen and tuple(map(int, version.split(".")[:2])) < (2, 38)
