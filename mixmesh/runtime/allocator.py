"""The C library's heap, kept from growing with every step.

PyTorch asks for aligned memory. Until glibc 2.38 a freed aligned piece often does not fit the next request
of the same size (glibc bug 14581), so that activations of some megabytes, which come and go with every
step, make the heap grow with every step. Pieces of their own from the kernel go back whole. That costs page
faults: nothing beside matrix products, up to a third of the time of elementwise operators.
"""

from __future__ import annotations

import ctypes
import os
import platform

OWN_PIECE_BYTES = 4 * 2**20  # tensors from this size on come from the kernel
KEPT_BYTES = 32 * 2**20  # at the end of the heap, for the smaller ones
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def steady_heap() -> bool:
    """Sets the limits above, where the C library needs it and the environment does not say otherwise;
    whether it did."""
    name, version = platform.libc_ver()
    chosen = any(key.startswith("MALLOC_") for key in os.environ) or "LD_PRELOAD" in os.environ
    if name != "glibc" or chosen or tuple(map(int, version.split(".")[:2])) >= (2, 38):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, OWN_PIECE_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
