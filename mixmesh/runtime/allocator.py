"""Keeps the C library's heap from growing with every step.

PyTorch asks for aligned memory. Until glibc 2.38 a freed aligned piece often does not fit the next request of
the same size (glibc bug 14581), so activations of some megabytes, which come and go with every step, make the
heap grow with every step.

On a device with room to spare that is accepted: the heap serves pieces of up to 32 MiB, as it does by glibc's
own rules, and gives nothing back. With new pages in every step a ResNet-18 with 16 images took 1.4 times as
long. On other devices, and in a process that exceeds what was planned, pieces of 8 MiB or more are mapped
directly from the kernel and go back to it whole. With a limit of 2 MiB ranks would hold 30 to 70 MiB less,
and the same in every run, but steps would take up to 5 % longer, as their pages are new each time.

So that limit is for a process that holds about as much as the plan promised. Such a process also returns the
free memory of its heap once, which costs page faults in the next step: little beside matrix products, up to
half the time of elementwise operators. Done at every step it makes a step of a small ResNet 1.4 times as long
and lowers the peak by 2 % (``python tests/memory_runs.py resnet-ddp-70-30``).
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from ..base.heap import KEPT_BYTES, OWN_PIECE_BYTES, ROOMY, ROOMY_PIECE_BYTES

SCARCE_PIECE_BYTES = 2 * 2**20  # the same where memory is scarce
SETTLING_STEPS = 2  # steps after which a process has held about as much as it will
NEAR = 0.98  # share of the planned memory from which on memory is scarce
SLACK = 1.1  # factor above the held memory within which a process counts as unchanged
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
EXCEEDED = 1.02  # factor above the planned memory from which on a heap no longer keeps everything
NEVER = -1  # a limit of M_TRIM_THRESHOLD: nothing is trimmed


def steady_heap() -> bool:
    """Sets the limits above if the C library has the bug; returns whether it did."""
    return grows() and map_pieces_from(OWN_PIECE_BYTES) and set_limit(M_TRIM_THRESHOLD, KEPT_BYTES)


def map_pieces_from(size_bytes: int) -> bool:
    """Makes pieces of this size or more come directly from the kernel; returns whether that worked."""
    return set_limit(M_MMAP_THRESHOLD, size_bytes)


def set_limit(number: int, size_bytes: int) -> bool:
    """Sets a limit of the C library's heap (``mallopt``); returns whether that worked."""
    return bool(ctypes.CDLL(None).mallopt(number, size_bytes))


def trim_heap() -> None:
    """Returns free pieces of the heap to the kernel if the heap grows with every step."""
    if grows():
        give_back()


class HeapLimit:
    """Lets the heap keep as much of its free end as the planned memory has room for, and keeps it small,
    between steps, once a process has held about as much as was planned, or would after a step that adds as
    much as the last one.

    A process may hold other things as well, a data set for instance. If the next step exceeds the limit, the
    process needs that much, and the limit is raised: returning memory at every step would only cost time, a
    fifth of a step of a small transformer (``python -m benchmarks compiled``).
    """

    def __init__(self, limit_bytes: int, roomy_bytes: float = 0.0, usable_bytes: float = math.inf) -> None:
        """Up to ``roomy_bytes``, 0 on a device without room to spare, the heap keeps everything; beside a
        data set up to more, but not more than ``usable_bytes``."""
        self.limit_bytes = limit_bytes  # 0 for none: nothing is returned
        self._usable_bytes = usable_bytes
        self._roomy_bytes, self._is_roomy = roomy_bytes, False
        self._is_scarce = self._has_just_trimmed = False
        self._num_steps = 0
        self._peak_bytes = 0  # the most that the process had ever held before the last step
        self._kept_bytes = KEPT_BYTES  # free bytes that the heap keeps at its end

    @classmethod
    def of_plan(cls, planned_bytes: int, usable_bytes: float = 0.0) -> HeapLimit:
        """The limit of a process that was promised this much, 0 for one without a prediction, on a device
        with ``usable_bytes``, 0 if that is unknown. The heap's end may come and go within any step, so it
        stays free."""
        is_roomy = ROOMY * planned_bytes <= usable_bytes
        roomy_bytes = (planned_bytes or usable_bytes / ROOMY) if is_roomy else 0.0
        return cls(max(planned_bytes - KEPT_BYTES, 0), roomy_bytes, usable_bytes or math.inf)

    def before_step(self) -> None:
        """Compares the memory of the process with the limit, and shrinks the heap or raises the limit."""
        if self.keeps_everything() or not self.limit_bytes or not grows():
            return
        held_bytes, peak_bytes = resident_bytes(), peak_resident_bytes()
        grown_bytes = peak_bytes - self._peak_bytes if self._num_steps else 0
        if grown_bytes:
            held_bytes = peak_bytes  # a part of it came and went within the last step
        # the first step makes the heap, others add fragments
        next_bytes = held_bytes + (grown_bytes if self._num_steps > 1 else 0)
        is_near = held_bytes > NEAR * self.limit_bytes or next_bytes > self.limit_bytes
        self._num_steps, self._peak_bytes = self._num_steps + 1, peak_bytes
        self._keep(KEPT_BYTES + self.room_bytes)
        if held_bytes <= self.limit_bytes and (self._is_scarce or not is_near):
            self._has_just_trimmed = False
        elif self._has_just_trimmed:
            map_pieces_from(OWN_PIECE_BYTES)  # the faster way again, as the other has not helped
            self.limit_bytes = round(SLACK * held_bytes)
            self._is_scarce = self._has_just_trimmed = False
        else:
            map_pieces_from(SCARCE_PIECE_BYTES)
            give_back()
            self.limit_bytes = max(self.limit_bytes, round(SLACK * resident_bytes()))
            self._is_scarce = self._has_just_trimmed = True

    def keeps_everything(self) -> bool:
        """Sets the heap's limits for a device with room to spare, and tells whether they hold. They do until
        the process has once held more than planned, or than half of that beside what it held at the first
        call, a data set for instance, where the device has the memory for both."""
        if not self._roomy_bytes or not grows():
            return False
        if not self._is_roomy:
            self._is_roomy = map_pieces_from(ROOMY_PIECE_BYTES) and set_limit(M_TRIM_THRESHOLD, NEVER)
            beside_bytes = min(resident_bytes() + self._roomy_bytes / 2, self._usable_bytes)
            self._roomy_bytes = max(EXCEEDED * self._roomy_bytes, beside_bytes, peak_resident_bytes())
        elif peak_resident_bytes() > self._roomy_bytes:
            steady_heap()
            give_back()
            self._roomy_bytes = 0.0
            return False
        return True

    @property
    def room_bytes(self) -> int:
        """The bytes that the process has never held, of those that it may hold; 0 until it has settled."""
        return max(self.limit_bytes - self._peak_bytes, 0) if self._num_steps > SETTLING_STEPS else 0

    def _keep(self, size_bytes: int) -> None:
        """Sets the free bytes that the heap keeps at its end; a step that frees more gives them back and maps
        them anew. What is kept beyond ``KEPT_BYTES`` adds at most that to the peak."""
        if size_bytes != self._kept_bytes and set_limit(M_TRIM_THRESHOLD, size_bytes):
            self._kept_bytes = size_bytes


@contextmanager
def heap_with_free(size_bytes: int) -> Iterator[None]:
    """A context in which larger pieces come from the heap too, up to ``size_bytes``, as they do in a step
    that has left so much of the heap free: a piece is only mapped directly if the heap has no room for it."""
    changes = grows() and size_bytes > OWN_PIECE_BYTES and map_pieces_from(size_bytes)
    try:
        yield
    finally:
        if changes:
            map_pieces_from(OWN_PIECE_BYTES)


def give_back() -> None:
    """Returns the heap's free memory to the kernel, if the C library supports that."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def peak_resident_bytes() -> int:
    """The most bytes that this process has held."""
    try:
        # on Linux ru_maxrss also counts the memory of the parent process before exec
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """The bytes that this process holds, or at most holds, where the system does not say."""
    with suppress(OSError):  # no /proc, or no more open files: a training goes on without the number
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_resident_bytes()


@cache
def grows() -> bool:
    """Whether this C library has the bug and the user has not configured or replaced its allocator."""
    name, version = platform.libc_ver()
    chosen = any(key.startswith("MALLOC_") for key in os.environ) or "LD_PRELOAD" in os.environ
    return name == "glibc" and not chosen and tuple(map(int, version.split(".")[:2])) < (2, 38)
