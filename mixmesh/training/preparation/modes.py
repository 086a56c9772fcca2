"""Plans a model in the modes that its training steps will have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ...runtime.modes import Modes, modes_of, set_modes
from ...runtime.whole_model import own_module


def has_own_train(model: nn.Module) -> bool:
    """Whether ``model.train()`` does more than set the mode of every module, which is the usual way to keep
    batch norm frozen."""
    return any(type(module).train is not nn.Module.train for module in model.modules())


@contextmanager
def as_its_train_has_it(model: nn.Module) -> Iterator[Modes]:
    """A context in which a training model with a ``train()`` of its own is in the state after calling it, as
    in every step of a loop that does. Yields the modes of its modules before, which are restored afterwards.
    """
    own = own_module(model)
    before = modes_of(model.modules())
    if own.training and has_own_train(own):
        own.train()
    try:
        yield before
    finally:
        set_modes((own, *model.modules()), (before[0], *before))
