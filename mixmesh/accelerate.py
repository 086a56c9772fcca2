"""``from mixmesh.accelerate import Accelerator``: Accelerate's Accelerator, training by a plan under
torchrun."""

from __future__ import annotations

from .training.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]
