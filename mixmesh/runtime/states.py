"""Checks that a state belongs to this model, or to its optimizer, before any of it is loaded: a file may
belong to another model or optimizer, or be damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from ..errors import PlanError
from ..frontend.job import is_elementwise
from .shard_numbers import Off
from .shard_tensor import ShardTensor
from .shards import Stored

SHOWN, SHOWN_CHARACTERS = 3, 200  # names listed in an error; characters shown of another error


def check_model_state(state: Any, stored: Mapping[str, Stored]) -> None:
    """Raises PlanError for anything but a ``state_dict`` of the whole model: for other names, or for values
    that are not tensors of the model's shapes."""
    if not isinstance(state, Mapping):
        raise _other_model("a dict of tensors by name", _kind(state))
    if missing := [name for name in stored if name not in state]:
        raise _other_model(_some(missing), f"a dict with {_some(list(state)) or 'nothing'}")
    if extra := [name for name in state if name not in stored]:
        raise _other_model("no other names than the model's", f"{_some(extra)} too")
    for name, s in stored.items():
        value = state[name]
        if not is_values(value) or tuple(value.shape) != s.shape:
            raise _other_model(f"{name}, a tensor of shape {list(s.shape)}", f"{name}, {_kind(value)}")


def check_optimizer_state(optimizer: optim.Optimizer, state: Any) -> None:
    """Raises PlanError for anything but a ``state_dict`` of an optimizer with these parameters: for other
    groups, or for states that do not match their parameters."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise _other_optimizer("a dict with 'state' and 'param_groups'", _kind(state))
    theirs = state.get("param_groups")
    if not isinstance(theirs, list) or not all(isinstance(g, dict) and _are_numbers(g) for g in theirs):
        raise _other_optimizer("param_groups, a list of dicts with the numbers of 'params'", _kind(theirs))
    own = [len(group["params"]) for group in optimizer.param_groups]
    got = [len(group["params"]) for group in theirs]
    numbers = [n for group in theirs for n in group["params"]]
    if own != got or len(set(numbers)) != len(numbers):
        raise _other_optimizer(f"groups of {_counts(own)} parameters", f"groups of {_counts(got)}")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    of_number = dict(zip(numbers, params))
    for n, entries in state["state"].items():
        if isinstance(n, bool) or n not in of_number or not isinstance(entries, Mapping):
            raise _other_optimizer(
                "a dict of states for each number of a parameter", f"{n!r}: {_kind(entries)}"
            )
        _check_entries(optimizer, of_number[n], entries)
    _try(optimizer, {of_number[n]: dict(entries) for n, entries in state["state"].items()}, theirs)


def numbered(state: Mapping[str, Any]) -> dict[Any, int]:
    """The place of each parameter of a state in the order of its groups, by its number in the state."""
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    return {n: place for place, n in enumerate(numbers)}


def is_values(value: Any) -> bool:
    """Whether ``value`` is a tensor with values that may be copied into one of ours."""
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"


def _check_entries(optimizer: optim.Optimizer, p: Tensor, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if isinstance(value, str | bytes):  # PyTorch would take it for a sequence of values
            raise _other_optimizer(f"{key}, a tensor or a number", _kind(value))
        if not isinstance(value, Tensor):
            continue
        if not is_values(value):
            raise _other_optimizer(f"{key}, a tensor with values", _kind(value))
        by_element = is_elementwise(optimizer) and value.ndim and not isinstance(value, ShardTensor)
        if by_element and tuple(value.shape) != tuple(p.shape):
            raise _other_optimizer(f"{key}, like its parameter of shape {list(p.shape)}", _kind(value))


def _try(optimizer: optim.Optimizer, state: dict[Tensor, dict], groups: list[dict]) -> None:
    """Loads the state into another optimizer of the same class first, because a failure would leave this one
    half changed."""
    other = object.__new__(type(optimizer))
    groups = [{**g, "params": own["params"]} for g, own in zip(groups, optimizer.param_groups)]
    try:
        with Off():
            other.__setstate__({"defaults": dict(optimizer.defaults), "state": state, "param_groups": groups})
    except Exception as error:
        kind = type(optimizer).__name__
        reason = f"{type(error).__name__}: {str(error)[:SHOWN_CHARACTERS]}"
        raise _other_optimizer(f"a state of {kind}", f"{kind} cannot take it over: {reason}") from error


def _are_numbers(group: Mapping[str, Any]) -> bool:
    numbers = group.get("params")
    return isinstance(numbers, list) and all(type(n) in (int, str) for n in numbers)


def _other_model(expected: str, got: str) -> PlanError:
    return PlanError(
        "the state is not of this model",
        expected=expected,
        got=got,
        hint="model.load_full_state_dict(original.state_dict()), of the model that was planned",
    )


def _other_optimizer(expected: str, got: str) -> PlanError:
    return PlanError(
        "the state is not of this optimizer",
        expected=expected,
        got=got,
        hint="the state_dict of an optimizer of the same kind, over the same parameters in the same groups",
    )


def _some(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )


def _counts(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) or "no"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        where = "" if is_values(value) else f", {value.layout} on {value.device.type}"
        return f"a tensor of shape {list(value.shape)}{where}"
    if isinstance(value, Mapping):
        return f"a dict with {_some(list(value)) or 'nothing'}"
    return f"a value of the type {type(value).__name__}"
