"""The Hugging Face Trainer. Needs transformers and accelerate, which mixmesh itself does not.

Reading order: ``refusals`` (arguments that are not supported), ``loss`` (the Trainer's own loss as part of
the model), ``trainer``. ``integrations.accelerate.one_process`` makes N ranks look like one process.
"""

from __future__ import annotations

from ..extras import require

require("mixmesh.hf", ("transformers", "accelerate"), "both installed", "transformers accelerate")

from .trainer import Seq2SeqTrainer, Trainer  # noqa: E402

__all__ = ["Seq2SeqTrainer", "Trainer"]
