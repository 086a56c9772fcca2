"""A Strategy for the Trainer of Lightning. Needs lightning, which mixmesh itself does not.

Reading order: ``refusals`` (unsupported settings), ``step`` (``training_step`` as the planned model, with the
values that it logs), ``parts`` and ``manual`` (manual optimization), ``strategy``.
"""

from __future__ import annotations

from ..extras import require

require(
    "mixmesh.lightning",
    ("lightning.pytorch",),
    "lightning installed (import lightning as L, not pytorch_lightning)",
    "'mixmesh[lightning]'",
)

from .strategy import Strategy  # noqa: E402

__all__ = ["Strategy"]
