"""A real mixed cluster on one Linux machine, and a plain multi-process run where that is not possible.

Reading order: ``launch`` (the entry), ``bed`` (what both kinds of run share), ``emulated``, then its parts
``network``, ``cgroups``, ``journal``; ``device`` is what a rank calls from inside.
"""

from mixmesh.testbed.bed import Bed
from mixmesh.testbed.capability import Capability, probe
from mixmesh.testbed.device import device_memory_peak_bytes, enter_device, join_device, leave_device
from mixmesh.testbed.emulated import Testbed
from mixmesh.testbed.journal import sweep
from mixmesh.testbed.launch import run
from mixmesh.testbed.plain import PlainBed
from mixmesh.testbed.result import RankResult, RunResult

__all__ = [
    "Bed",
    "Capability",
    "PlainBed",
    "RankResult",
    "RunResult",
    "Testbed",
    "device_memory_peak_bytes",
    "enter_device",
    "join_device",
    "leave_device",
    "probe",
    "run",
    "sweep",
]
