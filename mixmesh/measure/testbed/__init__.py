"""A real mixed cluster on one Linux machine, and a plain multi-process run where that is not possible.

Reading order: ``launch`` (the entry), ``bed`` (shared by both kinds of run), ``emulated``, then its parts
``network``, ``cgroups``, ``journal``; ``device`` is called by a rank from inside.
"""

from .bed import Bed
from .capability import Capability, probe
from .device import device_memory_peak_bytes, enter_device, join_device, leave_device
from .emulated import Testbed
from .journal import sweep
from .launch import run
from .plain import PlainBed
from .result import RankResult, RunResult

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
