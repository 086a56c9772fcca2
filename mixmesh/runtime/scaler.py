"""A GradScaler whose ranks agree on whether a step is skipped.

Where parameters are cut, only one rank sees that a gradient overflowed. The others would step, and go on
with another scale: the losses of one step would then be scaled differently.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError


class GradScaler(torch.amp.GradScaler):
    """As ``torch.amp.GradScaler``, for models that ``parallelize`` returned. ``step`` is collective."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not found:  # this rank owns nothing, and has to say so
            found = {found_inf.device: found_inf}
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyones = torch.stack([f.double() for f in found.values()]).max()
            if dist.get_backend() == "gloo":
                everyones = everyones.cpu()
            dist.all_reduce(everyones, dist.ReduceOp.MAX)
            for f in found.values():
                f.copy_(everyones)
        return found


def refuse_plain_scaler(*_) -> None:
    """Before an optimizer steps cut parameters: not on behalf of a scaler that asks this rank alone.

    Nothing passes the scaler to the optimizer, so the callers are looked at.
    """
    frame = sys._getframe(1)
    for _depth in range(8):
        if frame is None:
            return
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            if isinstance(caller, GradScaler):
                return
            raise InputError(
                "this GradScaler looks at the gradients of one rank only, and the plan cuts parameters",
                expected="a scaler whose ranks agree on whether to skip a step",
                got=f"{type(caller).__module__}.{type(caller).__qualname__}",
                hint="mixmesh.GradScaler, with the same arguments",
            )
        frame = frame.f_back
