"""Batch norm with ``momentum=None`` while it is exported: running statistics that are means over all batches.

PyTorch reads the number of batches out of its buffer for the factor of the newest one, and a graph holds no
numbers that change. Here the factor stays a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def means_over_batches() -> Iterator[None]:
    """Within it such layers can be exported."""
    original = _BatchNorm.forward

    def forward(module: _BatchNorm, input: Tensor) -> Tensor:
        count = module.num_batches_tracked
        follows = module.training and module.track_running_stats and count is not None
        if module.momentum is not None or not follows:
            return original(module, input)
        module._check_input_dim(input)
        count.add_(1)
        running = module.running_mean, module.running_var
        before = [t.clone() for t in running]
        # with a momentum of 1 they become those of this batch
        y = F.batch_norm(input, *running, module.weight, module.bias, True, 1.0, module.eps)
        for now, old in zip(running, before):
            now.copy_(old + (now - old) / count)
        return y

    _BatchNorm.forward = forward
    try:
        yield
    finally:
        _BatchNorm.forward = original
