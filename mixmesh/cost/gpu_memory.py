"""Estimates a GPU's memory other than the job's tensors, if no profile measured it: that of a process before
any tensor, and the loss of the caching allocator.

A plan that does not fit ends a training, while one that leaves some memory unused costs little, so figures
are at the upper end. docs/decisions/0093-allocator-and-communicators.md has the reasoning and the
measurements.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..cluster import Cluster
from .communicators import DATA, GRADIENT, Communicator

MIB = 2**20

# --- the process --------------------------------------------------------------------------------------------

# the context, and those of PyTorch's kernels that are loaded: 0.3 to 0.6 GB under CUDA 12 and 13, which load
# them lazily; 619 MiB were measured on an H100 (docs/benchmarks.md)
CONTEXT_BYTES = 640 * MIB
# kernels of cuBLAS, cuDNN and attention, which a process that computes loads with its first calls
KERNEL_BYTES = 200 * MIB
# cuBLAS and cuBLASLt have a workspace each for every thread and stream that multiplies: the forward pass and
# the backward pass are two threads (PyTorch's CublasHandlePool.cpp: 32 MiB from Hopper on, 4096 KiB twice and
# 16 KiB eight times before it, 128 MiB on MI300)
WORKSPACES = 2 * 2
WORKSPACE_BYTES = (
    (re.compile(r"MI\d"), 128 * MIB),
    (re.compile(r"V100|P100|T4|A100|A800|A10|A30|A40|L4|RTXA|RTX[234]|RTX6000Ada|GTX|RX"), 8320 * 1024),
)
NEWER_WORKSPACE_BYTES = 32 * MIB  # on Hopper and later, and on unknown cards


def workspace_bytes(device_name: str) -> int:
    """Bytes of all workspaces of matrix products on a card."""
    of_kind = (size for pattern, size in WORKSPACE_BYTES if pattern.match(device_name))
    return WORKSPACES * next(of_kind, NEWER_WORKSPACE_BYTES)


# --- communicators of NCCL ----------------------------------------------------------------------------------

# work queues, descriptions of the ranks, and NCCL's rounding
COMMUNICATOR_BYTES = 32 * MIB
# A connection of a channel has a buffer for each protocol (NCCL's init.cc: 4 MiB simple, 4.7 MiB LL128, 0.5
# MiB LL), allocated in steps of 2 MiB: 10 MiB at the receiving and 2 MiB at the sending end. With a network
# card that reads the GPU's memory both ends have all of them
INSIDE_BYTES, NETWORK_BYTES = 12 * MIB, 20 * MIB
PAIRWISE_BYTES = 14 * MIB  # a send and a receive to the same rank (NVIDIA/nccl issue 1685)
HOST_NETWORK_BYTES = 2 * MIB  # through a card that does not read it: buffers are in host memory
SHARED_STEPS = 16  # the buffer for sends between machines, which every communicator has (NCCL's net.cc)
RDMA_BYTES_PER_S = 3e9  # 25 Gbit/s: a slower network is taken for TCP, which does not read the GPU's memory
MULTICAST_BYTES = 300 * MIB  # buffers of NVLink SHARP, on machines with NVSwitch


class Wires(NamedTuple):
    """NCCL's use of the links of a machine, if they have at least ``bytes_per_s``: the ``channels`` of
    collectives, those of sends to each rank, and the bytes of a step of a send within the machine."""

    bytes_per_s: float
    channels: int
    pairwise_channels: int
    step_bytes: int


# NCCL reports 24 channels on eight A100 or H100 (NVIDIA/nccl issues 964, 1685), 16 between machines (1453)
WIRES = (
    Wires(400e9, 32, 32, 512 * 1024),  # Hopper's NVSwitch
    Wires(65e9, 24, 32, 512 * 1024),  # NVLink
    Wires(0.0, 8, 4, 128 * 1024),  # PCIe, or through the host's memory
)
NETWORK_CHANNELS = 16  # at most, between machines
NETWORK_PAIRWISE_CHANNELS = 2  # per rank, in communicators of several machines
NETWORK_STEP_BYTES = 128 * 1024
# neighbours in a ring and a tree: all, and those in other machines
MOST_NEIGHBOURS, MOST_FAR_NEIGHBOURS = 2, 4


def communicator_bytes(cluster: Cluster, communicator: Communicator, rank: int) -> int:
    """Bytes that a communicator holds on a rank's card, once all of its collectives have run."""
    machine = cluster.machine_index_of(rank)
    parts = cluster.by_machine(communicator.ranks)
    near, machines = len(parts.get(machine, ())), len(parts)
    wires = next(w for w in WIRES if cluster.machines[machine].link_bytes_per_s >= w.bytes_per_s)
    channels, pairwise, step_bytes, far_bytes = wires.channels, wires.pairwise_channels, wires.step_bytes, 0
    if machines > 1:
        channels, pairwise = min(channels, NETWORK_CHANNELS), NETWORK_PAIRWISE_CHANNELS
        step_bytes = NETWORK_STEP_BYTES
        rate = min(cluster.machines[machine].nic_bytes_per_s, cluster.bandwidth_bytes_per_s)
        far_bytes = NETWORK_BYTES if rate >= RDMA_BYTES_PER_S else HOST_NETWORK_BYTES
    size = COMMUNICATOR_BYTES + wires.pairwise_channels * SHARED_STEPS * step_bytes
    size += channels * min(near - 1, MOST_NEIGHBOURS) * INSIDE_BYTES
    size += channels * min(machines - 1, MOST_FAR_NEIGHBOURS) * far_bytes
    if wires is WIRES[0] and near > 2:
        size += MULTICAST_BYTES
    if communicator.is_pairwise:
        size += pairwise * (near - 1) * PAIRWISE_BYTES
    return size


def usual_communicators(world_size: int) -> tuple[Communicator, ...]:
    """The communicators that nearly every plan needs, for use before a plan exists: for samples and for
    gradients."""
    everyone = tuple(range(world_size))
    return tuple(Communicator(purpose, everyone) for purpose in (DATA, GRADIENT)) if world_size > 1 else ()


def process_bytes(
    cluster: Cluster, rank: int, communicators: Sequence[Communicator] | None = None, *, idle: bool
) -> int:
    """Bytes that a process holds on its card before any tensor. An ``idle`` one takes part in collectives and
    computes nothing. Without a plan it is assumed to have the usual ``communicators``."""
    if communicators is None:
        communicators = usual_communicators(cluster.world_size)
    own = (communicator_bytes(cluster, c, rank) for c in communicators if rank in c.ranks)
    device = cluster.devices[rank]
    kernels, context = device.kernel_bytes, device.context_bytes
    if kernels is None:
        kernels = KERNEL_BYTES + workspace_bytes(device.name)
    return (CONTEXT_BYTES if context is None else context) + (0 if idle else kernels) + sum(own)


def measured_bytes(
    constant: int,
    one: Sequence[int],
    world_size: int,
    communicators: Sequence[Communicator] | None,
    rank: int,
) -> int:
    """Bytes of a process whose ``constant`` was measured without communicators; ``one`` holds the bytes added
    by its first sum and its first all-to-all between all ranks. Older profiles lack ``one``, and their
    constant includes some communicators."""
    if not one:
        return constant
    flat, pairwise = one
    size = float(constant)
    for c in usual_communicators(world_size) if communicators is None else communicators:
        if rank in c.ranks:
            size += flat + c.is_pairwise * pairwise * (len(c.ranks) - 1) / max(world_size - 1, 1)
    return round(size)


# --- the caching allocator ----------------------------------------------------------------------------------

# x
GROWING_LOSS, FIXED_LOSS = 0.08, 0.32
POOL_BYTES = 80 * MIB
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one that is set counts


def allocator_loss(environment: Mapping[str, str] = os.environ) -> float:
    """The share of tensors' bytes that the allocator loses. It is smaller if the user's settings let segments
    grow; the runtime does not set this itself, as no GPU has yet confirmed the smaller loss."""
    text = next((environment[name] for name in SETTINGS if name in environment), "")
    return GROWING_LOSS if re.search(r"expandable_segments\s*:\s*True", text) else FIXED_LOSS
