"""``from mixmesh.hf import Trainer``: the Hugging Face Trainer, training by a plan under torchrun.
``SFTTrainer`` is that of TRL, which only this name needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .runtime.launch_store import keep_starts_apart
from .training.integrations.huggingface import Seq2SeqTrainer, Trainer
from .training.integrations.huggingface.refusals import not_covered

if TYPE_CHECKING:
    from .training.integrations.trl import SFTTrainer

keep_starts_apart()  # the arguments of a Trainer make process groups

__all__ = ["SFTTrainer", "Seq2SeqTrainer", "Trainer"]


def __getattr__(name: str) -> Any:
    if name != "SFTTrainer":
        if name.endswith("Trainer"):
            raise not_covered(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .training.integrations.trl import SFTTrainer

    return SFTTrainer
