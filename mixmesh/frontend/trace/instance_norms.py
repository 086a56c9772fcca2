"""Export of instance norm with running statistics.

PyTorch updates them within one operator, whose schema does not say so, and an export that keeps the operator
whole loses the update. Here it is written out, with means over the samples that stay exact on shards.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...base.patch import patched


def updates_written_out() -> AbstractContextManager[None]:
    """Within it every update of running statistics is exported."""
    original = torch.instance_norm

    def instance_norm(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        options = dict(zip(("use_input_stats", "momentum", "eps", "cudnn_enabled"), rest)) | named
        if options["use_input_stats"] and running_mean is not None and running_var is not None:
            values = input.detach().to(running_mean.dtype).flatten(2)
            for old, new in ((running_mean, values.mean(2)), (running_var, values.var(2))):
                old.copy_(old * (1 - options["momentum"]) + new.mean(0) * options["momentum"])
            running_mean = running_var = None
        return original(input, weight, bias, running_mean, running_var, **options)

    return patched(torch, "instance_norm", instance_norm)
