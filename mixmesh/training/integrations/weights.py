"""Whole weights in the script's own model, for evaluation and for files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...runtime.modes import modes_kept
from ...runtime.original import TakenOver, take_over
from ...runtime.parallel import ParallelModel
from ...runtime.shard_tensor import plain
from ...runtime.whole_model import give_learning, learn_alike


@torch.no_grad()
def fill(original: nn.Module, parallel: ParallelModel) -> None:
    """Copies the values of ``parallel`` into ``original``, including buffers that are in no state dict.
    Collective."""
    parallel._runtime.left.show()
    original.load_state_dict(parallel.full_state_dict())
    shown = dict(parallel.named_buffers(remove_duplicate=False))
    for name, buffer in original.named_buffers():
        if isinstance(buffer, TakenOver):
            stored = parallel._runtime.stored[name]
            buffer.copy_(stored.whole(plain(shown[name]), parallel.comm))


@contextmanager
def whole_weights(original: nn.Module, parallel: ParallelModel) -> Iterator[None]:
    """A context in which ``original`` is an ordinary model with the trained values; afterwards ``parallel``
    has taken it over again. Collective at its start."""
    with modes_kept(original.modules()):
        fill(original, parallel)
        heirs: dict[str, Tensor] = dict(parallel.named_parameters(remove_duplicate=False))
        own = dict(original.named_parameters())
        learning = learn_alike(heirs, own)
        heirs.update(parallel.named_buffers(remove_duplicate=False))
        try:
            yield
        finally:
            parallel._runtime.left.hide()
            give_learning(learning, own, heirs)
            for name, x in [*original.named_parameters(), *original.named_buffers()]:
                take_over(x, heirs[name])
