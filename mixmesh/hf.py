"""``from mixmesh.hf import Trainer``: the Hugging Face Trainer, training by a plan under torchrun."""

from __future__ import annotations

from .training.integrations.huggingface import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
