"""Export of instance norm with running statistics.

PyTorch updates them within one operator, whose schema does not say so, and an export that keeps the operator
whole loses the update. Here it is written out, with means over the samples that stay exact on shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

ARGUMENTS: dict[Callable, str] = {
    torch.instance_norm: (
        "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled"
    ),
    F.instance_norm: "input running_mean running_var weight bias use_input_stats momentum eps",
}
DEFAULTS = {"running_mean": None, "running_var": None, "use_input_stats": True, "momentum": 0.1}


def _with_updates(function: Callable) -> Callable:
    """Wraps ``function`` so that its update of running statistics is written out."""

    def instance_norm(*args: Any, **kwargs: Any) -> Any:
        call = DEFAULTS | dict(zip(ARGUMENTS[function].split(), args)) | kwargs
        mean, var = call["running_mean"], call["running_var"]
        if call["use_input_stats"] and mean is not None and var is not None:
            values = call["input"].detach().to(mean.dtype).flatten(2)
            for old, new in ((mean, values.mean(2)), (var, values.var(2))):
                old.copy_(old * (1 - call["momentum"]) + new.mean(0) * call["momentum"])
            call |= {"running_mean": None, "running_var": None}
        return function(**call)

    return instance_norm


STAND_INS = {function: _with_updates(function) for function in ARGUMENTS}
