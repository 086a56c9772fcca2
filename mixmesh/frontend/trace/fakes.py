"""Exports operators whose result shapes follow from input shapes, although PyTorch treats them as
data-dependent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls


def _ctc_loss(
    fake_mode: Any, op: Any, log_probs: Tensor, targets: Tensor, *lengths: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """The loss of every sample, and log_alpha by time and by position in the targets with blanks between
    them. The size of log_alpha is wrong for targets in one row, whose longest is not known, but only the
    backward reads it."""
    time, samples, _ = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty((samples, time, 2 * targets.shape[-1] + 1))


FAKES = {torch.ops.aten._ctc_loss.default: _ctc_loss, torch.ops.aten._ctc_loss.Tensor: _ctc_loss}


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """A context in which these operators can be exported."""
    table = fake_impls.op_implementations_dict
    before = dict(table)
    table.update(FAKES)
    try:
        yield
    finally:
        table.clear()
        table.update(before)
