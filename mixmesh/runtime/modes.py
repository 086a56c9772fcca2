"""The training modes of a model's modules: a program is made for one combination of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

Modes = tuple[bool, ...]  # for each module of a model in their order, whether it is in training mode


def modes_of(modules: Iterable[nn.Module]) -> Modes:
    """The training modes of these modules."""
    return tuple([module.training for module in modules])


def modes_by_name(model: nn.Module) -> dict[str, bool]:
    """The training mode of each module of a model, by name."""
    return {name: module.training for name, module in model.named_modules()}


def set_modes(modules: Iterable[nn.Module], modes: Modes) -> None:
    """Sets the mode of each module without calling ``train()``, which models may override."""
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode
