"""``from mixmesh.hf import Trainer``: the Hugging Face Trainer, training under torchrun by a plan."""

from __future__ import annotations

from .integrations.huggingface import Trainer

__all__ = ["Trainer"]
