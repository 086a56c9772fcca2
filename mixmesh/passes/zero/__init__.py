"""Layer 3: Poplar's division of a batch between devices that differ (AAAI'25). No torch."""

from .allocation import Allocation, allocate, step_seconds
from .stages import STAGES, ownable, stored_by_owners, with_owners, with_stage, zero_stage

__all__ = [
    "STAGES",
    "Allocation",
    "allocate",
    "ownable",
    "step_seconds",
    "stored_by_owners",
    "with_owners",
    "with_stage",
    "zero_stage",
]
