"""Layers that a model leaves out at random, as those of speech and of time series do by default in
transformers: refused with the line that turns this off (LayerDrop, Fan et al., 2020)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from ...errors import TraceError
from .locate import Place

_DECISION = re.compile(r"layer_?drop|skip_\w*layer|to_drop|drop\w*_prob")  # in the line that decides
_SETTING = re.compile(r"layer_?drop")


def of_a_layer_left_out(place: Place, model: nn.Module) -> TraceError | None:
    """The error for a line of ``model`` that decides whether a layer runs; None for another line, and for a
    model without such a setting."""
    settings = _settings(model) if _DECISION.search(place.source) else {}
    if not settings:
        return None
    name, chance = next(iter(settings.items()))
    return TraceError(
        "the model leaves out layers at random, so that it cannot be traced",
        expected="the same layers in every step",
        got=f"{name} = {chance}",
        where=str(place),
        hint=tuple(f"{name} = 0.0, before the model is prepared" for name in settings),
    )


def _settings(model: nn.Module) -> dict[str, float]:
    """The chances that are not zero, by the names under which ``forward`` reads them: attributes of modules,
    or where there are none, entries of their configurations."""
    modules = {".".join(filter(None, ("model", path))): module for path, module in model.named_modules()}
    of_modules = dict(s for path, module in modules.items() for s in _chances(path, vars(module)))
    if of_modules:
        return of_modules
    configs: dict[int, tuple[str, object]] = {}
    for path, module in modules.items():
        config = vars(module).get("config")
        configs.setdefault(id(config), (f"{path}.config", config))  # parts share it
    known = ((path, getattr(config, "__dict__", {})) for path, config in configs.values())
    return dict(setting for path, values in known for setting in _chances(path, values))


def _chances(path: str, values: dict[str, object]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if _SETTING.search(key) and isinstance(value, float) and value > 0:
            yield f"{path}.{key}", value
