"""Shapes of results that PyTorch holds to depend on values, though the shapes of the inputs decide them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses import fake_impls


def _ctc_loss(fake_mode, op, log_probs, targets, *lengths, **options):
    """The loss of every sample, and log_alpha: by time and by position in the targets with blanks between.
    Targets of one dim stand in a row, the longest one is then not known; nobody but the backward reads it."""
    time, samples, _ = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty((samples, time, 2 * targets.shape[-1] + 1))


FAKES = {torch.ops.aten._ctc_loss.default: _ctc_loss, torch.ops.aten._ctc_loss.Tensor: _ctc_loss}


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Within it these operators can be exported."""
    table = fake_impls.op_implementations_dict
    before = dict(table)
    table.update(FAKES)
    try:
        yield
    finally:
        table.clear()
        table.update(before)
