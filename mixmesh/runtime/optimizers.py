"""A ready-made torch optimizer on shards: its parameters swapped in place, its state cut or collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from ..errors import InputError
from ..job import ELEMENTWISE, can_be_fused, is_elementwise
from .comm import Comm
from .shards import Stored


def check_optimizer(optimizer: optim.Optimizer, stored: Mapping[str, Stored]) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        raise InputError(
            f"{kind} is not supported: its line search needs whole gradients and repeated steps",
            expected="an optimizer whose step() takes no closure, such as AdamW",
        )
    cut = [s.name for s in stored.values() if s.num_pieces]
    if cut and not is_elementwise(optimizer):
        raise InputError(
            f"{kind} may mix the elements of a parameter, and the plan cuts {len(cut)} of them",
            expected=f"an elementwise optimizer: {', '.join(ELEMENTWISE)}",
            got=f"{kind}; cut parameters: {', '.join(cut[:3])}{' ...' if len(cut) > 3 else ''}",
            hint="choose a plan that keeps parameters whole, such as ddp-proportional",
        )


def fuse(optimizer: optim.Optimizer) -> bool:
    """Has PyTorch's fused kernel make the steps of an optimizer where it can and nobody chose otherwise;
    whether it does now. On a CPU that takes a sixth (AdamW) or half (SGD) of the time, with the same
    results up to rounding."""
    if not can_be_fused(optimizer):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
    return True


def put_on_shards(
    optimizer: optim.Optimizer, swapped: Mapping[Tensor, tuple[Tensor, Stored]], rank: int
) -> None:
    """Makes the optimizer of a model that of one rank: its parameters swapped, its steps fused where they can
    be, and gradients laid out in memory as the parameters are."""
    swap_params(optimizer, swapped, rank)
    fuse(optimizer)
    optimizer.register_step_pre_hook(lambda o, *_: lay_out(o))


def lay_out(optimizer: optim.Optimizer) -> None:
    """Gives gradients and state the strides of their parameters, as they have on a single device: a fused
    kernel walks them all in the order of memory. Sums over ranks leave gradients contiguous, as checkpoints
    leave state, and a parameter in channels_last is not."""
    for p in params_of(optimizer):
        if p.grad is not None:
            p.grad = _laid_out(p.grad, p)
        state = optimizer.state.get(p)
        for key, value in state.items() if state else ():
            if isinstance(value, Tensor) and value.shape == p.shape:
                state[key] = _laid_out(value, p)


def _laid_out(t: Tensor, p: Tensor) -> Tensor:
    if t.layout is not torch.strided or t.stride() == p.stride():
        return t
    return torch.empty_like(p, dtype=t.dtype).copy_(t)


def swap_params(
    optimizer: optim.Optimizer, swapped: Mapping[Tensor, tuple[Tensor, Stored]], rank: int
) -> None:
    """Puts new parameters in the place of old ones, in their own groups, and cuts state like them.

    The optimizer object stays, so learning rate schedulers stay attached. Raises InputError for a
    parameter that is not the model's.
    """
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if p not in swapped]
        if foreign:
            raise InputError(
                "the optimizer holds a parameter that is not the model's",
                got=f"a parameter of shape {list(foreign[0].shape)}",
                hint="make the optimizer from model.parameters() before parallelize",
            )
        group["params"] = [swapped[p][0] for p in group["params"]]
    for old in list(optimizer.state):
        if old not in swapped:
            continue
        new, stored = swapped[old]
        state = optimizer.state.pop(old)
        optimizer.state[new] = {k: _cut(v, stored, rank, new.device) for k, v in state.items()}


def params_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _cut(value: Any, stored: Stored, rank: int, device: torch.device) -> Any:
    if isinstance(value, Tensor) and value.ndim and tuple(value.shape) == stored.shape:
        return stored.piece(value, rank, device)
    return value


def full_state(optimizer: optim.Optimizer, stored: Mapping[Tensor, Stored], comm: Comm) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors on the CPU, the same on all ranks. Collective."""
    packed = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    mine = {
        n: {k: _outline(v, p) for k, v in optimizer.state.get(p, {}).items()} for n, p in enumerate(params)
    }
    outlines: list[Any] = [None] * comm.world_size
    if comm.world_size == 1:
        outlines = [mine]
    else:
        dist.all_gather_object(outlines, mine, group=comm.groups["data", comm.everyone])
    state: dict[int, dict[str, Any]] = {}
    for n, p in enumerate(params):
        s = stored[p]
        known = next((o[n] for rank, o in enumerate(outlines) if rank in s.counted.ranks and o[n]), None)
        if known is None:
            continue
        state[n] = {}
        for key, (like_param, what) in known.items():
            if not like_param:
                state[n][key] = what
                continue
            piece = optimizer.state.get(p, {}).get(key)
            if piece is None:
                piece = torch.zeros(p.shape, dtype=what, device=comm.device)
            entry = replace(s, name=f"{key} of {s.name}", dtype=what)
            state[n][key] = entry.whole(piece, comm).cpu().clone()
    return {"state": state, "param_groups": packed["param_groups"]}


def _outline(value: Any, p: Tensor) -> tuple[bool, Any]:
    if isinstance(value, Tensor) and value.ndim and value.shape == p.shape:
        return True, value.dtype
    return False, value.cpu() if isinstance(value, Tensor) else value


def load_full_state(
    optimizer: optim.Optimizer, stored: Mapping[Tensor, Stored], full: dict[str, Any], comm: Comm
) -> None:
    """Loads what ``full_state`` (or a single-device optimizer's ``state_dict``) gave."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for n, entries in full["state"].items():
        s = stored[params[n]]
        if comm.rank in s.held.ranks:
            # copies: load_state_dict itself would share step counters with what was passed
            entries = {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries.items()}
            state[n] = {k: _cut(v, s, comm.rank, comm.device) for k, v in entries.items()}
    optimizer.load_state_dict({"state": state, "param_groups": full["param_groups"]})
