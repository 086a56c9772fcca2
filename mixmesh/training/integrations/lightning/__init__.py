"""A Strategy for the Trainer of Lightning. Needs lightning, which mixmesh itself does not.

Reading order: ``refusals`` (what cannot be kept), ``step`` (``training_step`` as the model that is planned,
with what it logs), ``strategy``.
"""

from __future__ import annotations

from ....errors import InputError

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise InputError(
        "mixmesh.lightning needs lightning",
        expected="lightning installed (import lightning as L, not pytorch_lightning)",
        got=str(error),
        hint="pip install 'mixmesh[lightning]'",
    ) from error

from .strategy import Strategy

__all__ = ["Strategy"]
