"""Layers and spans of sound that a model leaves out at random, as those of speech and of time series do by
default in transformers: refused with the line that turns this off (LayerDrop, Fan et al., 2020; SpecAugment,
Park et al., 2019)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from ...errors import TraceError
from .locate import Place

_DECISION = re.compile(r"layer_?drop|skip_\w*layer|to_drop|drop\w*_prob")  # in the line that decides
_SETTING = re.compile(r"layer_?drop")
_MASKING = re.compile(r"_mask_(hidden_states|input_features)\(|_compute_mask_indices\(")
_MASKED = "apply_spec_augment"


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


def of_masked_spans(place: Place, model: nn.Module) -> TraceError | None:
    """The error for a line of ``model`` that masks spans, which NumPy draws by the lengths of the samples;
    None for another line, and for a model that masks none."""
    if not _MASKING.search(place.source):
        return None
    masking = [name for name, config in _configs(model) if getattr(config, _MASKED, False)]
    if not masking:
        return None
    return TraceError(
        "the model masks spans of its input at random, so that it cannot be traced",
        expected="random numbers of torch, which are operators of the program",
        got=f"{masking[0]}.{_MASKED} = True",
        where=str(place),
        hint=(
            f"{masking[0]}.{_MASKED} = False, before the model is prepared",
            "spans of the input that are masked in the data set or its collate_fn",
        ),
    )


def _settings(model: nn.Module) -> dict[str, float]:
    """The chances that are not zero, by the names under which ``forward`` reads them: attributes of modules,
    or where there are none, entries of their configurations."""
    of_modules = dict(s for path, module in _modules(model).items() for s in _chances(path, vars(module)))
    if of_modules:
        return of_modules
    known = ((name, getattr(config, "__dict__", {})) for name, config in _configs(model))
    return dict(setting for path, values in known for setting in _chances(path, values))


def _configs(model: nn.Module) -> list[tuple[str, object]]:
    """The configurations of a model and its parts, which may share them, with the names of the first to have
    each."""
    configs: dict[int, tuple[str, object]] = {}
    for path, module in _modules(model).items():
        config = vars(module).get("config")
        configs.setdefault(id(config), (f"{path}.config", config))
    return list(configs.values())


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {".".join(filter(None, ("model", path))): module for path, module in model.named_modules()}


def _chances(path: str, values: dict[str, object]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if _SETTING.search(key) and isinstance(value, float) and value > 0:
            yield f"{path}.{key}", value
