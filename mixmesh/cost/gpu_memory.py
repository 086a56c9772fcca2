"""Bytes of a GPU's memory that are no tensor of the job: what a process holds before any, where no profile
measured it.

A plan that does not fit ends a training, one that leaves some memory unused costs little: figures are at
the upper end. What the caching allocator loses between tensors (blocks of 512 bytes, segments of 2 and 20
MiB) is to be had from the share of the memory that planners leave free.
"""

from __future__ import annotations

# context, PyTorch's and the libraries' kernels as far as they are loaded: 0.3 to 0.6 GB under CUDA 12 and 13,
# which load them lazily
CONTEXT_BYTES = 600 * 2**20
# cuBLAS and cuBLASLt have 32 MiB each on Hopper and 8 elsewhere (PyTorch's CublasHandlePool.cpp) for every
# thread and stream that multiplies: the forward pass and the backward pass are two threads
WORKSPACE_BYTES = 2 * 2 * 32 * 2**20
# NCCL keeps a buffer of 4 MiB (NCCL_BUFFSIZE) for each way of each channel of a ring, and about a quarter of
# it for its other protocols; it takes 2 to 32 channels, and 16 are assumed
GROUP_BYTES = 2 * 16 * 5 * 2**20
# groups of a rank that have a communicator: all ranks, gradients, pieces with owners, the loss
GROUPS = 4


def process_bytes(world_size: int, *, idle: bool) -> int:
    """Bytes that a process among ``world_size`` holds on its GPU; one that is ``idle`` takes part in
    collectives and computes nothing."""
    groups = GROUPS if world_size > 1 else 0
    return CONTEXT_BYTES + groups * GROUP_BYTES + (0 if idle else WORKSPACE_BYTES)
