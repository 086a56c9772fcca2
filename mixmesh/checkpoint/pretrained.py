"""The files, other than weights, that transformers' ``save_pretrained`` writes: they describe the model."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn

from ..runtime.whole_model import own_module

PRETRAINED = "pretrained"  # among the values of a manifest
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")  # not imported: it is there if the model is
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def pretrained_files(model: nn.Module) -> dict[str, str]:
    """The texts of ``config.json`` and ``generation_config.json`` by name, as ``save_pretrained`` writes
    them, for a model of transformers, parallel or not. Empty for any other model, and for a config that
    cannot be written as JSON."""
    runtime = getattr(model, "_runtime", None)
    original: Any = own_module(model if runtime is None else runtime.original)
    if not is_pretrained(original):
        return {}
    try:
        config = json.loads(original.config.to_json_string())
        generates = getattr(original, "generation_config", None) is not None and original.can_generate()
        generation = json.loads(original.generation_config.to_json_string()) if generates else None
    except (TypeError, ValueError):  # values of an unknown kind: no reason to end a training
        return {}
    config["architectures"] = [type(original).__name__]
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if dtypes:
        config["dtype"] = str(dtypes[0]).removeprefix("torch.")
    files = {CONFIG: _text(config)}
    if generation is not None:
        generation.pop("compile_config", None)
        files[GENERATION_CONFIG] = _text(generation)
    return files


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"
