"""Memory of devices that hold a part of a job only."""

from __future__ import annotations

from mixmesh.cost import gpu_memory
from mixmesh.planner.task import HEADROOM


def memory_gib(room_mib: float, world_size: int) -> float:
    """Memory of a GPU of which a plan may use ``room_mib`` beside what the process itself holds."""
    process_mib = gpu_memory.process_bytes(world_size, idle=False) / 2**20
    return (process_mib + room_mib) / (1 - HEADROOM) / 1024
