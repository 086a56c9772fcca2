"""A GradScaler whose ranks agree on whether to skip a step.

If parameters are cut, only one rank may see that a gradient overflowed. The others would step, and continue
with another scale, so that the losses of one step would be scaled differently. Gradients of cut parameters
are shards, for which ranks always agree on whether they are finite (``shard_tensor``). This scaler also
agrees on gradients that are whole on every rank, which would differ between ranks only because of a fault.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.units import ranks_text
from ..lang.ir import Program
from .first_rank import largest


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for models that ``parallelize`` returned. ``step`` is collective."""

    has_overflowed = False  # whether a gradient of the last step overflowed, on any rank

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16) -> dict[torch.device, Tensor]:
        inf_by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not inf_by_device:  # this rank owns nothing, and must report that
            inf_by_device = {found_inf.device: found_inf}
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyones = torch.stack([f.double() for f in inf_by_device.values()]).max()
            of_all = largest(everyones, "whether gradients are finite")
            for f in inf_by_device.values():
                f.copy_(of_all)
        self.has_overflowed = any(bool(f) for f in inf_by_device.values())
        return inf_by_device


def unscaled_text(program: Program, scaler: torch.amp.GradScaler | None) -> str:
    """A text naming the ranks that compute a program's bf16 in float16 although no scaler scales the loss;
    empty if there are none."""
    if scaler is not None and scaler.is_enabled():
        return ""
    ranks = [rank for name, row in program.dtypes for rank, dtype in enumerate(row) if dtype != name]
    has, computes = ("has", "computes") if len(ranks) == 1 else ("have", "compute")
    if not ranks:
        return ""
    in_float16 = f"{ranks_text(ranks)} {has} no bf16 and {computes} it in float16"
    return f"{in_float16}, whose gradients vanish and overflow without a scaled loss"


def with_agreement(scaler: torch.amp.GradScaler) -> GradScaler:
    """A scaler with the settings and the state of ``scaler``, whose ranks agree."""
    agreeing = GradScaler(scaler._device, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        agreeing.load_state_dict(scaler.state_dict())
    return agreeing
