"""Operators of our own, in PyTorch's registry under ``torch.ops.mixmesh``.

They are operators of PyTorch's cut in two, with what ranks have to tell each other between the parts, and
regions of several put into one, whose inside no sharding could be told of.
"""

from __future__ import annotations

import torch

from . import losses, mixtures, norms
from .losses import cross_entropy, cross_entropy_of_part, sum_exp, sum_exp_of_part
from .mixtures import count_kept_bytes, experts, experts_of_part
from .norms import local_batch_norm, moments, normalise, running_statistics
from .pieces import PIECE_BYTES

__all__ = [
    "PIECE_BYTES", "count_kept_bytes", "cross_entropy", "cross_entropy_of_part", "experts", "experts_of_part",
    "local_batch_norm", "moments", "normalise", "running_statistics", "sum_exp", "sum_exp_of_part",
]  # fmt: skip

LIBRARY = torch.library.Library("mixmesh", "DEF")
for schema, run in (*norms.SCHEMAS, *losses.SCHEMAS, *mixtures.SCHEMAS):
    LIBRARY.impl(LIBRARY.define(schema), run, "CompositeImplicitAutograd")
