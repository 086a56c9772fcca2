"""Export of batch norm with ``momentum=None``, whose running statistics are means over all batches.

PyTorch reads the number of batches from a buffer to compute the weight of the newest batch, but a graph
cannot hold a number that changes. Here the weight stays a tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ...base.patch import patched


def means_over_batches() -> AbstractContextManager[None]:
    """A context in which such layers can be exported."""
    original = _BatchNorm.forward

    def forward(module: _BatchNorm, input: Tensor) -> Tensor:
        count, mean, var = module.num_batches_tracked, module.running_mean, module.running_var
        if module.momentum is not None or not (module.training and module.track_running_stats):
            return original(module, input)
        if count is None or mean is None or var is None:
            return original(module, input)
        module._check_input_dim(input)
        count.add_(1)
        before = [mean.clone(), var.clone()]
        # with a momentum of 1 they become the statistics of this batch
        y = F.batch_norm(input, mean, var, module.weight, module.bias, True, 1.0, module.eps)
        for now, old in zip((mean, var), before):
            now.copy_(old + (now - old) / count)
        return y

    return patched(_BatchNorm, "forward", forward)
