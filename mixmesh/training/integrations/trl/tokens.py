"""The loss of next tokens, and what TRL logs beside it, computed from whole logits.

TRL computes both in a kernel of its own, from the positions that have a label. How many these are depends on
the data, while a program has one shape; the numbers are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a position where nothing is to be predicted


def next_labels(labels: Tensor, length: int) -> Tensor:
    """The label that follows each position, ``(samples, length)``; nothing follows the last one. ``length``
    counts virtual tokens before the first label too, as prompt tuning puts them there."""
    return F.pad(labels, (length - labels.shape[-1], 1), value=IGNORED)[..., 1:]


def token_losses(logits: Tensor, labels: Tensor, kind: str) -> Tensor:
    """The loss of each position, 0 where the label is ignored. ``logits`` are ``(samples, length,
    vocabulary)`` and ``labels`` those of ``next_labels``. ``kind`` is "nll", or "dft": the loss times the
    probability of the label, as a constant (https://huggingface.co/papers/2508.05629)."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses * torch.exp(-losses).detach() if kind == "dft" else losses


@torch.no_grad()
def token_counts(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Three sums over the positions whose label is not ignored, in float32: their number, the entropies of
    the predicted distributions, and the number of labels that are the most probable token. They are not one
    tensor, since that would have a row for each sample of a batch of three."""
    mask = labels != IGNORED
    # a product of matrices, since one value per token is kept, not another tensor as large as the logits
    means = (logits.softmax(-1).unsqueeze(-2) @ logits.unsqueeze(-1)).flatten(-3)
    entropies = logits.logsumexp(-1) - means
    is_first = logits.argmax(-1) == labels
    sums = mask.sum(), (entropies * mask).sum(), (is_first & mask).sum()
    return tuple(each.float() for each in sums)
