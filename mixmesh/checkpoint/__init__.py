"""Checkpoints: everything that a training needs to continue, on the same devices or on others.

Reading order: ``saving`` and ``loading`` (the functions), ``background`` (saving during the training),
``state`` (tensors by name), ``storage`` (files), ``manifest`` (sizes and checksums, names of folders),
``ranks`` (failures that all ranks learn of), ``exporting`` and ``weights`` (weights for and from other
programs).

No pickle is read: tensors are raw bytes, all else is JSON (``values``). PyTorch's
``torch.distributed.checkpoint`` plans which rank writes and reads which piece; its own files, whose
``.metadata`` is a pickle, are not used (docs/decisions/0004-checkpoints-without-pickles.md).
"""

from __future__ import annotations

from ..training.preparation.loading import resumable
from .background import Saving
from .exporting import Exported, export
from .loading import Loaded, latest, load
from .preemption import Preemption
from .saving import save, save_async
from .weights import load_weights

__all__ = [
    "Exported", "Loaded", "Preemption", "Saving", "export", "latest", "load", "load_weights", "resumable",
    "save", "save_async",
]  # fmt: skip
