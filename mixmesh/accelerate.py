"""``from mixmesh.accelerate import Accelerator``: that of Accelerate, training under torchrun by a plan."""

from __future__ import annotations

from .training.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]
