"""How PyTorch's tensors lie in the memory of a CPU's process (``runtime.allocator``)."""

from __future__ import annotations

OWN_PIECE_BYTES = 8 * 2**20  # from this size on tensors come from the kernel, in new pages, not from the heap
KEPT_BYTES = 32 * 2**20  # free bytes that the heap keeps at its end
