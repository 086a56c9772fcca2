"""How PyTorch's tensors lie in the memory of a CPU's process (``runtime.allocator``)."""

from __future__ import annotations

OWN_PIECE_BYTES = 8 * 2**20  # from this size on tensors come from the kernel, in new pages, not from the heap
KEPT_BYTES = 32 * 2**20  # free bytes that the heap keeps at its end
# a device with this many times the memory that a rank needs lets the heap keep all of it, with pieces of any
# size up to the largest limit that glibc takes
ROOMY = 1.25
ROOMY_PIECE_BYTES = 32 * 2**20
