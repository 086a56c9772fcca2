"""Export of ``nn.SyncBatchNorm``, as in scripts for DistributedDataParallel.

Its statistics are those of the whole batch, as for every planned batch norm. It would exchange them with the
other ranks, but only one rank exports.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...base.patch import patched


def synced_norms_as_plain() -> AbstractContextManager[None]:
    """A context in which such layers are ordinary batch norms of their own input."""

    def forward(module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        return _BatchNorm.forward(module, input)

    return patched(nn.SyncBatchNorm, "forward", forward)
