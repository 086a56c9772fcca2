"""The size of tensors that a CPU's heap does not hold."""

OWN_PIECE_BYTES = 8 * 2**20  # these come directly from the kernel, in new pages (``runtime.allocator``)
