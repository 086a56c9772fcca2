"""Memory of devices that hold a part of a job only."""

from __future__ import annotations

import pytest

from mixmesh.cluster.device import HEADROOM
from mixmesh.cost import gpu_memory


def memory_gib(room_mib: float) -> float:
    """Memory of a GPU of which tensors of a plan may take ``room_mib`` beside what a process without
    communicators holds, and what the allocator loses."""
    process = gpu_memory.CONTEXT_BYTES + gpu_memory.KERNEL_BYTES + gpu_memory.workspace_bytes("small")
    tensors_mib = room_mib * (1 + gpu_memory.allocator_loss())
    return ((process + gpu_memory.POOL_BYTES) / 2**20 + tensors_mib) / (1 - HEADROOM) / 1024


@pytest.fixture(autouse=True)
def free_communicators(monkeypatch):
    """In a module that imports it communicators hold nothing: a hundred times the models of small devices,
    they would decide which plan fits."""
    monkeypatch.setattr(gpu_memory, "communicator_bytes", lambda cluster, communicator, rank: 0)
