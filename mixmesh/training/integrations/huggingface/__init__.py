"""The Hugging Face Trainer. Needs transformers and accelerate, which mixmesh itself does not.

Reading order: ``refusals`` (which arguments cannot be kept), ``loss`` (the Trainer's own loss as part of the
model), ``trainer``. That N ranks look like one process is done in ``integrations.accelerate.one_process``.
"""

from __future__ import annotations

from ....errors import InputError

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise InputError(
        "mixmesh.hf needs transformers and accelerate",
        expected="both installed",
        got=str(error),
        hint="pip install transformers accelerate",
    ) from error

from .trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
