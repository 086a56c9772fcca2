"""Layer 3: Poplar's division of a batch between devices that differ (AAAI'25). No torch."""

from .allocation import Allocation, allocate, step_seconds
from .stages import with_stage

__all__ = ["Allocation", "allocate", "step_seconds", "with_stage"]
