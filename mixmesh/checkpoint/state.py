"""The tensors of a model and of its optimizer by the model's own names, as pieces of the whole.

``model:NAME`` is a parameter or buffer, by the first of its names; ``optimizer:KEY:NAME`` a state of the
parameter NAME. The names are those of the model on a single device, so another plan finds its pieces by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..errors import InputError, PlanError
from ..frontend.trace.dtypes import DTYPE_NAME, TORCH_DTYPE
from ..runtime.optimizers import NUMBERS, params_of
from ..runtime.shard_tensor import ShardTensor, plain, shard
from ..runtime.shards import Stored
from ..runtime.states import check_optimizer_state
from ..runtime.whole_model import pieces_of
from .manifest import Manifest, TensorEntry
from .tensor_files import check_dtype
from .values import decode, encode

MODEL, OPTIMIZER = "model:", "optimizer:"
# optimizer options that do not change its results: a resumed run keeps its own
KERNELS = ("fused", "foreach")
SHOWN = 3  # names in an error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by checkpoint name, a tied one once. Raises InputError
    for other state (``get_extra_state``)."""
    tensor_of: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in pieces_of(model).items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name} cannot be kept in a checkpoint",
                expected="parameters and buffers",
                got=f"a {type(value).__name__}, of get_extra_state",
            )
        if id(value) not in seen:
            seen.add(id(value))
            tensor_of[MODEL + name] = value.detach()
    return tensor_of


def with_elements(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that have elements: files hold nothing of the others."""
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def entries_of_empty(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """The entries of a manifest for the tensors that have no elements, and so no pieces. Raises InputError
    for a dtype that cannot be kept."""
    entries = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            check_dtype(name, tensor.dtype)
            entries[name] = TensorEntry(DTYPE_NAME[tensor.dtype], tuple(tensor.shape), ())
    return entries


def own_model_tensors(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """The tensors of a model that this rank writes: neither those that another rank writes, nor empty
    ones."""
    tensors = with_elements(model_tensors(model))
    runtime = getattr(model, "_runtime", None)
    if runtime is None:
        return tensors
    stored = runtime.stored
    counting = {name: stored[name.removeprefix(MODEL)].counting for name in tensors}
    return {name: t for name, t in tensors.items() if counting[name] in (None, rank)}


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer whose parameters have the names of a model, and the way each is stored (None: whole on
    this rank)."""

    optimizer: optim.Optimizer
    params: Mapping[str, Tensor]
    stored: Mapping[str, Stored | None]
    rank: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: optim.Optimizer, rank: int) -> NamedOptimizer:
        """A NamedOptimizer. Raises InputError for an optimizer with parameters that are not the model's."""
        names = {id(p): name for name, p in model.named_parameters()}
        runtime = getattr(model, "_runtime", None)
        by_param = {} if runtime is None else runtime.by_param
        params = {}
        for p in params_of(optimizer):
            if id(p) not in names:
                raise InputError(
                    "the optimizer holds a parameter that is not the model's",
                    got=f"a parameter of shape {list(p.shape)}",
                    hint="one module that holds all that is trained",
                )
            params[names[id(p)]] = p
        return cls(optimizer, params, {name: by_param.get(p) for name, p in params.items()}, rank)

    def names(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        name_of = {id(p): name for name, p in self.params.items()}
        return [[name_of[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    def description(self) -> dict[str, Any]:
        """The optimizer without its state, encoded: its class, and names and settings of each group."""
        groups = []
        for number, (names, group) in enumerate(zip(self.names(), self.optimizer.param_groups)):
            settings = {k: v for k, v in group.items() if k != "params"}
            groups.append({"params": names, "settings": encode(settings, f"group {number} of the optimizer")})
        return {"class": type(self.optimizer).__name__, "groups": groups}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of the state that this rank has a part of, by checkpoint name; and its plain values by
        parameter and key, encoded."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        packed = self.optimizer.state_dict()["state"]
        for number, name in enumerate(self.params):
            stored = self.stored[name]
            counts = stored is None or self.rank in stored.counted.ranks
            for key, value in packed.get(number, {}).items():
                if not isinstance(key, str) or ":" in key:
                    raise InputError(f"a state of {name} cannot be kept in a checkpoint", got=repr(key))
                if not isinstance(value, Tensor):
                    if counts:
                        values.setdefault(name, {})[key] = encode(value, f"{key} of {name}")
                elif value.numel() and (counts or isinstance(value, ShardTensor)):
                    tensors[f"{OPTIMIZER}{key}:{name}"] = value
        return tensors, values

    def check(self, kept: dict[str, Any]) -> None:
        """Raises PlanError if ``kept``, the optimizer in a checkpoint, is a different one."""
        if kept["class"] != type(self.optimizer).__name__:
            raise _other_optimizer(kept["class"], type(self.optimizer).__name__)
        theirs, own = [sorted(group["params"]) for group in kept["groups"]], list(map(sorted, self.names()))
        if len(theirs) != len(own):
            raise _other_optimizer(f"{len(theirs)} groups of parameters", f"{len(own)}")
        for number, (names, mine) in enumerate(zip(theirs, own)):
            if names != mine:
                differing = sorted({*names} ^ {*mine})[:SHOWN]
                raise _other_optimizer(
                    f"{len(names)} parameters in group {number}",
                    f"{len(mine)}, among those that differ {', '.join(differing)}",
                )

    def room(self, manifest: Manifest) -> dict[str, dict[str, Any]]:
        """The state that this rank will have, by parameter and key: plain values, and tensors to be filled. A
        rank without a piece of a parameter has empty states: optimizers expect states for all parameters or
        for none."""
        assert manifest.optimizer is not None
        kept = manifest.optimizer["state"]
        state = {
            name: {key: decode(value) for key, value in kept.get(name, {}).items()} for name in self.params
        }
        for full_name, entry in manifest.tensors.items():
            if not full_name.startswith(OPTIMIZER):
                continue
            _, key, name = full_name.split(":", 2)
            if name not in self.params:
                raise _other_optimizer(f"a parameter {name}", "none of this name")
            state[name][key] = _empty_like(self.params[name], key, entry)
        return {name: entries for name, entries in state.items() if entries}

    def packed(self, state: Mapping[str, Mapping[str, Any]], kept: dict[str, Any]) -> dict[str, Any]:
        """``state`` in the form that the optimizer's ``load_state_dict`` expects, with the settings from the
        checkpoint."""
        numbers = {name: n for n, name in enumerate(self.params)}
        groups = []
        for group, names, theirs in zip(self.optimizer.param_groups, self.names(), kept["groups"]):
            own = {k: v for k, v in group.items() if k in KERNELS}
            settings = {**group, **decode(theirs["settings"]), **own}
            groups.append({**settings, "params": [numbers[name] for name in names]})
        return {
            "state": {numbers[name]: dict(entries) for name, entries in state.items()},
            "param_groups": groups,
        }

    def load(self, state: Mapping[str, Mapping[str, Any]], kept: dict[str, Any]) -> None:
        """Takes over ``state``, in the dtypes that it was saved in."""
        self.optimizer.load_state_dict(self.packed(state, kept))
        for name, entries in state.items():
            own = self.optimizer.state[self.params[name]]
            for key, value in entries.items():
                # load_state_dict has cast it to the dtype of p
                if isinstance(value, Tensor) and own[key].dtype != value.dtype:
                    own[key] = plain(value).to(own[key].device)


def _empty_like(p: Tensor, key: str, entry: TensorEntry) -> Tensor:
    dtype = TORCH_DTYPE[entry.dtype]
    is_number = not entry.shape and key in NUMBERS
    if isinstance(p, ShardTensor) and tuple(p.shape) == entry.shape and not is_number:
        piece = torch.empty_like(plain(p), dtype=dtype, requires_grad=False)
        return shard(piece, replace(p.whole, written=None))
    if tuple(p.shape) == entry.shape and not is_number:
        return torch.empty_like(p, dtype=dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=dtype)


def check_model(tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
    """Raises PlanError if a checkpoint is not of this model: other names, shapes or dtypes."""
    kept = {name: entry for name, entry in manifest.tensors.items() if name.startswith(MODEL)}
    missing, extra = sorted(set(tensors) - set(kept)), sorted(set(kept) - set(tensors))
    if missing or extra:
        raise _other_model(_some(extra) or "no other names", _some(missing) or "without these")
    for name, entry in kept.items():
        mine = tensors[name]
        if tuple(mine.shape) != entry.shape or DTYPE_NAME.get(mine.dtype) != entry.dtype:
            raise _other_model(
                f"{name.removeprefix(MODEL)}, {entry.dtype}{list(entry.shape)}",
                f"{DTYPE_NAME.get(mine.dtype)}{list(mine.shape)}",
            )


def load_optimizer_room(
    named: NamedOptimizer, manifest: Manifest
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Room for the optimizer's state, by parameter and by checkpoint name. Raises PlanError if the checkpoint
    is of another optimizer; nothing is changed."""
    assert manifest.optimizer is not None
    named.check(manifest.optimizer)
    state = named.room(manifest)
    check_optimizer_state(named.optimizer, named.packed(state, manifest.optimizer))
    tensors = {
        f"{OPTIMIZER}{key}:{name}": value
        for name, entries in state.items()
        for key, value in entries.items()
        if isinstance(value, Tensor) and f"{OPTIMIZER}{key}:{name}" in manifest.tensors
    }
    return state, tensors


def _some(names: list[str]) -> str:
    shown = ", ".join(name.removeprefix(MODEL) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _other_model(expected: str, got: str) -> PlanError:
    return PlanError(
        "the checkpoint is of another model",
        expected=f"{expected}, as in the checkpoint",
        got=got,
        hint="the model that was trained before, or another folder",
    )


def _other_optimizer(expected: str, got: str) -> PlanError:
    return PlanError(
        "the checkpoint is of another optimizer",
        expected=f"{expected}, as in the checkpoint",
        got=got,
        hint=(
            "an optimizer of this class, over the same parameters in the same groups",
            "another folder",
        ),
    )


def state_bytes(model: nn.Module, optimizer: optim.Optimizer) -> int:
    """The size of all that this rank holds of a model and its optimizer."""
    states = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, Tensor)]
    return sum(plain(t).nbytes for t in (*pieces_of(model).values(), *states))
