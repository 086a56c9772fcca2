"""``mixmesh.save``: one line in place of a script's ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from ..errors import InputError
from ..runtime.first_rank import from_first_rank
from ..runtime.parallel import full_optimizer_state_dict
from ..runtime.whole_model import whole


def save(path: str | Path, **parts: Any) -> None:
    """Writes the file that ``torch.save({"model": model.state_dict(), ...}, path)`` writes on one device.

    ``parts`` are models (parallel ones, averages of them, any module), optimizers, schedulers and whatever
    else has a ``state_dict``, and plain values. An optimizer's state is made whole where its model is among
    the parts. Collective: call it on every rank, outside of ``if rank == 0``. The first rank writes, and all
    go on when the file is there; what it cannot write is raised on all ranks. Without torchrun it is
    ``torch.save``. Raises InputError, before anything is sent, for a loader without ``state_dict``: a
    DataLoader, an iterator, or what else gives batches and has ``loader`` in its name.
    """
    for name, part in parts.items():
        check_has_state(name, part)
    models = [m for part in parts.values() if isinstance(part, nn.Module) for m in parallel_models(part)]
    states = {name: full_state(part, models) for name, part in parts.items()}
    if dist.is_initialized():
        from_first_rank(lambda: torch.save(states, path))
    else:
        torch.save(states, path)


def check_has_state(name: str, part: Any) -> None:
    """Raises InputError for a loader that cannot say how far it has come: as a plain value it would be
    written with its data, and not be gone on with."""
    if hasattr(part, "state_dict") or not _is_loader(name, part):
        return
    raise InputError(
        f"{name} does not know how far it has come",
        expected="a loader with state_dict, as the one that mixmesh.prepare returns under torchrun",
        got=f"a plain {type(part).__name__}",
        hint=(
            f"{name} = mixmesh.checkpoint.resumable({name}), before the loop",
            f"or leave {name} out, and save between epochs: mixmesh.save(..., epoch=epoch + 1)",
            "torchdata.stateful_dataloader.StatefulDataLoader(...) in place of DataLoader(...)",
        ),
    )


def _is_loader(name: str, part: Any) -> bool:
    """Whether a part gives batches. What is no DataLoader and no iterator does so where its name says it:
    other lists of tensors may be results."""
    if isinstance(part, DataLoader | Iterator):
        return True
    if "loader" not in name.lower() or isinstance(part, str | Mapping | torch.Tensor | np.ndarray):
        return False
    if isinstance(part, list | tuple):
        return any(isinstance(x, torch.Tensor | np.ndarray) for x in pytree.tree_leaves(part))
    return hasattr(part, "__iter__")


def parallel_models(module: nn.Module) -> list[nn.Module]:
    """The parallel models that a module is or holds."""
    return [m for m in module.modules() if hasattr(m, "_runtime")]


def full_state(part: Any, models: list[nn.Module]) -> Any:
    """The state of one part as on a single device; a plain value is its own state. Collective."""
    if isinstance(part, nn.Module):
        with whole(part) as module:
            # the weights are lent
            return {name: _kept(value) for name, value in module.state_dict().items()}
    if isinstance(part, torch.optim.Optimizer):
        own = {p for group in part.param_groups for p in group["params"]}
        for model in models:
            if not own.isdisjoint(model._runtime.by_param):
                return full_optimizer_state_dict(model, part)
    return part.state_dict() if hasattr(part, "state_dict") else part


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
