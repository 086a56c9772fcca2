"""The training modes of a model's modules: a program is made for one combination of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

COMPILED = "._orig_mod"  # inserted by torch.compile into names of modules

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


def set_modes_by_name(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Sets the mode of each module of a model for whose name there is one, compiled or not."""
    mode_of = {name.replace(COMPILED, ""): mode for name, mode in modes.items()}
    for name, module in model.named_modules():
        module.training = mode_of.get(name.replace(COMPILED, ""), module.training)


def set_modes_like(module: nn.Module, parallel: nn.Module) -> None:
    """Gives each module within ``module`` the mode of the one of its name in ``parallel``; one that is not
    there gets the mode of the whole."""
    for each in module.modules():
        each.training = parallel.training
    set_modes_by_name(module, modes_by_name(parallel))


class FollowedModes:
    """Makes a parallel model follow the modes that a script sets on modules it took from its model before
    that was made parallel: ``norm = net.norm; net, ... = prepare(net, ...); norm.eval()``."""

    def __init__(self, original: nn.Module, parallel: nn.Module) -> None:
        shown = dict(parallel.named_modules())
        pairs = [(module, shown[name]) for name, module in original.named_modules() if name in shown]
        self._originals, self._shown = tuple(m for m, _ in pairs), tuple(m for _, m in pairs)
        self.show()

    def show(self) -> None:
        """Gives the script's own modules the modes of the parallel model, which has just been set."""
        self._seen = modes_of(self._shown)
        set_modes(self._originals, self._seen)

    def pass_on(self) -> None:
        """Passes the modes that changed since the last time to the other side; those of the script's own
        modules come first."""
        own, shown = modes_of(self._originals), modes_of(self._shown)
        if own == shown == self._seen:
            return
        self._seen = tuple(o if o != seen else s for o, s, seen in zip(own, shown, self._seen))
        set_modes(self._originals, self._seen)
        set_modes(self._shown, self._seen)


@contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context at whose end the modules train or evaluate as they did before."""
    kept = tuple(modules)
    modes = modes_of(kept)
    try:
        yield
    finally:
        set_modes(kept, modes)
