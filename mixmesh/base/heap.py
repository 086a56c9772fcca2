"""How PyTorch's tensors lie in the memory of a CPU's process (``runtime.allocator``)."""

from __future__ import annotations

OWN_PIECE_BYTES = 8 * 2**20  # larger tensors are not in the heap: they come from the kernel, in new pages
KEPT_BYTES = 32 * 2**20  # free bytes that the heap keeps at its end
