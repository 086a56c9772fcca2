"""``nn.SyncBatchNorm``, which scripts for DistributedDataParallel have, while a model is exported.

Its statistics are those of the whole batch, as those of every batch norm that is planned are; it would ask
the other ranks for theirs, which are not there while one rank exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def synced_norms_as_plain() -> Iterator[None]:
    """Within it such layers are batch norms of the batch that they are given."""
    original = nn.SyncBatchNorm.forward

    def forward(module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        return _BatchNorm.forward(module, input)

    nn.SyncBatchNorm.forward = forward
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = original
