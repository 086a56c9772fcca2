"""Operators of our own, in PyTorch's registry under ``torch.ops.mixmesh``.

Some are one PyTorch operator split in two, with a collective between the parts. Others combine a region of
several operators into one, because no sharding rule could describe its inside.
"""

from __future__ import annotations

import torch

from . import losses, mixtures, norms, selected
from .losses import cross_entropy, cross_entropy_of_part, sum_exp, sum_exp_of_part
from .mixtures import Operands, count_kept_bytes, experts, experts_of_part
from .norms import local_batch_norm, moments, normalise, running_statistics
from .pieces import PIECE_BYTES
from .selected import RowOperands

__all__ = [
    "PIECE_BYTES", "Operands", "RowOperands", "count_kept_bytes", "cross_entropy", "cross_entropy_of_part",
    "experts", "experts_of_part", "local_batch_norm", "moments", "normalise", "running_statistics",
    "sum_exp", "sum_exp_of_part",
]  # fmt: skip

LIBRARY = torch.library.Library("mixmesh", "DEF")
for schema, run in (*norms.SCHEMAS, *losses.SCHEMAS, *mixtures.SCHEMAS, *selected.SCHEMAS):
    LIBRARY.impl(LIBRARY.define(schema), run, "CompositeImplicitAutograd")
