"""``L.Trainer(strategy=mixmesh.lightning.Strategy())``: Lightning's Trainer, training by a plan under
torchrun."""

from __future__ import annotations

from .training.integrations.lightning import Strategy

__all__ = ["Strategy"]
