"""TRL's SFTTrainer. Needs trl, which mixmesh itself does not.

Reading order: ``refusals`` (arguments that are not supported), ``tokens`` (the loss and the metrics of a
batch from its logits), ``sft``.
"""

from __future__ import annotations

from ..extras import require

require("mixmesh.hf.SFTTrainer", ("trl",), "trl installed", "'trl>=1.16,<2'")

from .sft import SFTTrainer  # noqa: E402

__all__ = ["SFTTrainer"]
