"""``mixmesh.save``: one line that replaces a script's ``torch.save``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from ...errors import InputError
from ...runtime.first_rank import everyones, from_first_rank
from ...runtime.parallel import ParallelModel, full_optimizer_state_dict
from ...runtime.shard_tensor import ShardTensor
from ...runtime.watch import in_call
from ...runtime.whole_model import whole


def save(path_or_state: Any, path: Any = None, /, **parts: Any) -> None:
    """Writes the file that ``torch.save`` writes on one device: ``save(state, path)`` in place of
    ``torch.save(state, path)``, or ``save(path, model=model, ...)``.

    ``state`` is what a script has put together, with ``model.state_dict()`` and ``optimizer.state_dict()``
    anywhere in its dicts, lists and tuples; pieces of tensors are made whole. A parallel model itself is
    written as the user's own module. ``path`` may be an open file.

    ``parts`` are written as ``torch.save({"model": model.state_dict(), ...}, path)`` does: models (parallel
    ones, averages of them, any module), optimizers, schedulers and whatever else has a ``state_dict``, and
    plain values. Collective: call it on every rank, outside of ``if rank == 0``. The first rank writes, and
    all continue when the file is there; if it cannot write, the error is raised on all ranks. Without
    torchrun it is ``torch.save``. Raises InputError, before anything is sent, for a loader without
    ``state_dict`` (a DataLoader, an iterator, or anything else that gives batches and has ``loader`` in its
    name), and for a ``state`` that has pieces of other tensors on some ranks.
    """
    with in_call("save"):
        _save(path_or_state, path, parts)


def _save(path_or_state: Any, path: Any, parts: dict[str, Any]) -> None:
    if path is not None:
        if parts:
            raise InputError(
                "a file holds a state, or parts by name",
                expected="mixmesh.save(state, path), or mixmesh.save(path, model=model)",
                got=f"mixmesh.save(state, path, {', '.join(f'{name}=...' for name in parts)})",
            )
        save_state(path_or_state, path)
        return
    for name, part in parts.items():
        check_has_state(name, part)
    models = [m for part in parts.values() if isinstance(part, nn.Module) for m in parallel_models(part)]
    for model in models:
        model.check_replicas()
    save_state({name: full_state(part, models) for name, part in parts.items()}, path_or_state)


def save_state(state: Any, path: Any) -> None:
    """Writes ``state``, in which pieces of tensors may be anywhere, whole. Collective."""
    if isinstance(state, nn.Module):
        with whole(state) as module:
            from_first_rank(lambda: torch.save(module, path))
        return
    names = tuple(f"{place}: {x.whole.stored.name} {list(x.shape)}" for place, x in pieces(state))
    names_of_ranks = everyones(names)
    if len(set(names_of_ranks)) > 1:
        first = set(names_of_ranks[0])
        missing = sorted({name for others in names_of_ranks for name in first.symmetric_difference(others)})
        raise InputError(
            "the ranks have pieces of other tensors in their states",
            expected="the same state on every rank",
            got=f"{', '.join(missing[:3])} on some ranks alone",
            hint="mixmesh.save(path, model=model, optimizer=optimizer, ...), which makes the states itself",
        )
    values = with_whole_tensors(state)
    from_first_rank(lambda: torch.save(values, path))


def pieces(state: Any, place: str = "state") -> Iterator[tuple[str, ShardTensor]]:
    """The pieces of tensors within dicts, lists and tuples, each with its place."""
    if isinstance(state, ShardTensor):
        yield place, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from pieces(value, f"{place}[{key!r}]")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from pieces(value, f"{place}[{number}]")


def with_whole_tensors(state: Any) -> Any:
    """``state`` with whole tensors instead of pieces. Parts without pieces are not copied. Collective."""
    if isinstance(state, ShardTensor):
        return state.full_tensor().detach().clone()
    if next(pieces(state), None) is None:
        return state
    if isinstance(state, Mapping):
        values = {key: with_whole_tensors(value) for key, value in state.items()}
        if not isinstance(state, dict):
            return values
        filled = copy.copy(state)  # keeps the class, and the attributes that PyTorch adds to a module's state
        filled.update(values)
        return filled
    items = [with_whole_tensors(value) for value in state]
    return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)


def check_has_state(name: str, part: Any) -> None:
    """Raises InputError for a loader that cannot report its position: as a plain value it would be written
    together with its data, and could not be resumed."""
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
    """Whether a part gives batches: a DataLoader, an iterator, or an object with the name of a loader, since
    other lists of tensors may be results."""
    if isinstance(part, DataLoader | Iterator):
        return True
    if "loader" not in name.lower() or isinstance(part, str | Mapping | torch.Tensor | np.ndarray):
        return False
    if isinstance(part, list | tuple):
        return any(isinstance(x, torch.Tensor | np.ndarray) for x in pytree.tree_leaves(part))
    return hasattr(part, "__iter__")


def parallel_models(module: nn.Module) -> list[ParallelModel]:
    """The parallel models that a module is or contains."""
    return [m for m in module.modules() if isinstance(m, ParallelModel)]


def full_state(part: Any, models: list[ParallelModel]) -> Any:
    """The state of one part as on a single device, or its pieces if it is an optimizer of another model; a
    plain value is its own state. Collective."""
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
