"""A ready-made torch optimizer on shards: its parameters are swapped in place, its state is cut or
collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, optim

from ..base.patch import put_on
from ..errors import InputError, PlanError
from ..frontend.job import can_be_fused, is_elementwise
from .comm import Comm
from .first_rank import everyones
from .shard_numbers import Off
from .shard_tensor import ShardTensor, plain, shard
from .shards import Stored
from .states import check_optimizer_state, numbered

# scalar states of PyTorch's optimizers; all other states have the shape of their parameter
NUMBERS = frozenset(("step", "mu_product", "eta", "mu"))


def fuse(optimizer: optim.Optimizer) -> bool:
    """Switches an optimizer to PyTorch's fused kernel if possible and the user has not chosen otherwise;
    returns whether it did. On a CPU a fused step takes a sixth (AdamW) or half (SGD) of the time, with the
    same results up to rounding."""
    if not can_be_fused(optimizer):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
    return True


def put_on_shards(
    optimizer: optim.Optimizer, swapped: Mapping[Tensor, tuple[Tensor, Stored]], rank: int
) -> None:
    """Turns a model's optimizer into this rank's: its parameters are swapped, its steps fused if possible,
    and gradients get the memory layout of their parameters."""
    swap_params(optimizer, swapped, rank)
    if fuse(optimizer) and isinstance(optimizer, optim.SGD):
        _fuse_with_every_momentum(optimizer)
    optimizer.register_step_pre_hook(lambda o, *_: lay_out(o))


def _fuse_with_every_momentum(optimizer: optim.Optimizer) -> None:
    """Makes SGD step a group without the fused kernel while some of its parameters have a momentum and others
    have their first gradient, such as unfrozen ones: for the kernel, all have one or none has."""
    unfused: list[dict[str, Any]] = []

    def before(*_: Any) -> None:
        with Off():
            groups = [group for group in optimizer.param_groups if group["fused"]]
            unfused[:] = [group for group in groups if _some_have_momentum(group, optimizer)]
        for group in unfused:
            group["fused"] = None

    def after(*_: Any) -> None:
        for group in unfused:
            group["fused"] = True

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _some_have_momentum(group: Mapping[str, Any], optimizer: optim.Optimizer) -> bool:
    """Whether some parameters of a group that have gradients have a momentum, and others have none yet."""
    stepped = [p for p in group["params"] if p.grad is not None] if group["momentum"] else []
    return len({optimizer.state.get(p, {}).get("momentum_buffer") is None for p in stepped}) == 2


def lay_out(optimizer: optim.Optimizer) -> None:
    """Gives gradients and state the strides of their parameters, as on a single device, because a fused
    kernel walks all of them in memory order. Sums over ranks leave gradients contiguous, checkpoints leave
    state contiguous, and a parameter in channels_last is not."""
    with Off():
        for p in params_of(optimizer):
            grad = p.grad
            if grad is not None and _is_otherwise(grad, p):
                p.grad = _laid_out(grad, p)
            if p.is_contiguous():  # so is its state
                continue
            state = optimizer.state.get(p) or {}
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == p.shape and _is_otherwise(value, p):
                    state[key] = _laid_out(value, p)


def _is_otherwise(t: Tensor, p: Tensor) -> bool:
    return t.layout is torch.strided and t.stride() != p.stride()


def _laid_out(t: Tensor, p: Tensor) -> Tensor:
    return torch.empty_like(p, dtype=t.dtype).copy_(t)


def swap_params(
    optimizer: optim.Optimizer, swapped: Mapping[Tensor, tuple[Tensor, Stored]], rank: int
) -> None:
    """Replaces old parameters by new ones in the same groups, and cuts their state in the same way. The
    optimizer object stays, so learning rate schedulers stay attached."""
    for group in optimizer.param_groups:
        group["params"] = [swapped[p][0] for p in group["params"]]
    for old in list(optimizer.state):
        if old not in swapped:
            continue
        new, stored = swapped[old]
        state = optimizer.state.pop(old)
        optimizer.state[new] = {k: _cut(k, v, stored, rank, new.device) for k, v in state.items()}


def step_on_pieces(optimizer: optim.Optimizer, holders: tuple[int, ...] | None, rank: int) -> None:
    """Makes an elementwise optimizer of torch.optim step on plain pieces, with the same result as on shards
    but some microseconds less per shard. Any other optimizer steps on plain tensors if ``holders`` have all
    parameters whole: on those ranks it steps as on a single device, on the others, which hold nothing, not at
    all. Hooks and closures still see shards."""
    kind = type(optimizer)
    own = vars(optimizer).get("step")
    tracked = hasattr(own, "_wrapped_by_lr_sched")
    kernel = getattr(kind.step, "__wrapped__", None)
    by_element = is_elementwise(optimizer)
    if not (by_element or holders) or (own is not None and not tracked) or kernel is None:
        return
    takes_part = by_element or rank in (holders or ())
    # a step of the user's own may use other tensors, such as the original's, and that has to be refused
    context = Off if kernel.__module__.startswith("torch.") else lambda: _AsPieces(optimizer)

    @wraps(kernel)
    def on_pieces(self, closure=None, **kwargs):
        self._opt_called = True  # a learning rate scheduler checks this
        pieces = context()
        seeing = _seeing_shards(closure, pieces)
        with pieces:
            if not takes_part:
                return None if seeing is None else seeing()
            closures = () if seeing is None else (seeing,)  # some optimizers take no closure
            out = kernel(self, *closures, **kwargs)
        if by_element:  # on all ranks; other optimizers have state on their holders only, whole
            _show_state(self)
        return out

    step = optim.Optimizer.profile_hook_step(on_pieces)
    if tracked:
        put_on(step, "_wrapped_by_lr_sched", True)
    put_on(optimizer, "step", MethodType(step, optimizer))


class _AsPieces:
    """A context in which the parameters of an optimizer, their gradients and their state are plain tensors:
    this rank's pieces."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._shards: list[ShardTensor] = []

    def __enter__(self) -> None:
        with Off():
            for p in params_of(self._optimizer):
                state = self._optimizer.state.get(p, {}).values()
                self._shards += [x for x in (p, p.grad, *state) if isinstance(x, ShardTensor)]
            for x in self._shards:
                x.__class__ = Tensor  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        with Off():
            for x in self._shards:
                x.__class__ = ShardTensor
            self._shards.clear()


def _seeing_shards(closure: Callable[[], Any] | None, pieces: Any) -> Callable[[], Any] | None:
    if closure is None:
        return None

    def called() -> Any:
        if isinstance(pieces, _AsPieces):
            pieces.__exit__()
            try:
                return closure()
            finally:
                pieces.__enter__()
        with torch._C._EnableTorchFunction():
            return closure()

    return called


def also_drop(optimizer: optim.Optimizer, drop: Callable[[], object]) -> None:
    """Makes ``zero_grad`` also call ``drop``, for gradients that wait to be summed."""
    kind = type(optimizer)

    @wraps(kind.zero_grad)
    def zero_grad(self, set_to_none: bool = True) -> None:
        with Off():
            kind.zero_grad(self, set_to_none)
        drop()

    put_on(optimizer, "zero_grad", MethodType(zero_grad, optimizer))


def show_shards(optimizer: optim.Optimizer) -> None:
    """Makes ``state_dict`` return the state of pieces as shards, and ``load_state_dict`` accept shards or
    whole tensors."""
    optimizer.register_state_dict_post_hook(_with_shards)
    optimizer.register_load_state_dict_pre_hook(_with_pieces)
    optimizer.register_load_state_dict_post_hook(_show_state)


def _show_state(optimizer: optim.Optimizer) -> None:
    """Makes shards, in the same memory, of the state that was made on pieces: a norm of it that the loop
    reads is the whole's, as that of a gradient is."""
    with Off():
        for p in params_of(optimizer):
            if not isinstance(p, ShardTensor):
                continue
            state = optimizer.state.get(p) or {}
            for key, value in state.items():
                if type(value) is Tensor:
                    state[key] = _shown(value, p)


def _with_shards(optimizer: optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    state = dict(packed["state"])
    for n, p in enumerate(params_of(optimizer)):
        if isinstance(p, ShardTensor) and n in state:
            state[n] = {key: _shown(value, p) for key, value in state[n].items()}
    return {**packed, "state": state}


def _shown(value: Any, p: ShardTensor) -> Any:
    if isinstance(value, Tensor) and plain(value).ndim and plain(value).shape == p.to_local().shape:
        return shard(plain(value), replace(p.whole, written=None))
    return value


def _with_pieces(optimizer: optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    check_optimizer_state(optimizer, packed)
    params, places = params_of(optimizer), numbered(packed)
    state = {
        n: {key: _piece(key, value, params[places[n]]) for key, value in entries.items()}
        for n, entries in packed["state"].items()
    }
    return {**packed, "state": state}


def _piece(key: str, value: Any, p: Tensor) -> Any:
    if isinstance(value, Tensor) and isinstance(p, ShardTensor):
        value = plain(value)
        return _cut(key, value, p.whole.stored, p.whole.comm.rank, value.device)
    return value


def params_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _cut(key: str, value: Any, stored: Stored, rank: int, device: torch.device) -> Any:
    """The rank's piece of a state that has the shape of its parameter."""
    if not isinstance(value, Tensor) or tuple(value.shape) != stored.shape:
        return value
    return value if not value.ndim and key in NUMBERS else stored.piece(value, rank, device)


def cut_state(state: Mapping[str, Any], p: Tensor, stored: Stored, comm: Comm) -> dict[str, Any]:
    """The state of a whole parameter in the form that an optimizer has for this rank's ``p`` as a shard."""
    pieces = {key: _cut(key, value, stored, comm.rank, comm.device) for key, value in state.items()}
    return {key: _shown(value, p) for key, value in pieces.items()} if isinstance(p, ShardTensor) else pieces


def full_state(optimizer: optim.Optimizer, stored: Mapping[Tensor, Stored], comm: Comm) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors on the CPU, the same on all ranks. Collective."""
    packed = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p not in stored for p in params):
        raise InputError(
            "the optimizer has parameters that are none of this model's",
            expected="the optimizer that was prepared with the model, or one made of model.parameters()",
            got=f"{type(optimizer).__name__} with {sum(p not in stored for p in params)} other parameters",
            hint="model, optimizer, loader = mixmesh.prepare(model, optimizer, loader)",
        )
    mine = {
        n: {k: _outline(v, p) for k, v in optimizer.state.get(p, {}).items()} for n, p in enumerate(params)
    }
    with comm.call("full_optimizer_state_dict"):
        state = _full_entries(optimizer, mine, stored, comm)
    return {"state": state, "param_groups": packed["param_groups"]}


def _full_entries(
    optimizer: optim.Optimizer,
    mine: dict[int, dict[str, Any]],
    stored: Mapping[Tensor, Stored],
    comm: Comm,
) -> dict[int, dict[str, Any]]:
    """The whole state of every parameter by its number, made from this rank's state in ``mine``.
    Collective."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    outlines = everyones(mine, comm.groups.get(("data", comm.everyone)))  # a single rank has no group
    state: dict[int, dict[str, Any]] = {}
    for n, p in enumerate(params):
        s = stored[p]
        outline = next((o[n] for rank, o in enumerate(outlines) if rank in s.counted.ranks and o[n]), None)
        if outline is None:
            continue
        state[n] = {}
        for key, (like_param, what) in outline.items():
            if not like_param:
                state[n][key] = what
                continue
            piece = optimizer.state.get(p, {}).get(key)
            if piece is None:
                piece = torch.zeros(plain(p).shape, dtype=what, device=comm.device)
            entry = replace(s, name=f"{key} of {s.name}", dtype=what)
            state[n][key] = entry.whole(plain(piece), comm).cpu().clone()
    return state


def _outline(value: Any, p: Tensor) -> tuple[bool, Any]:
    if not isinstance(value, Tensor):
        return False, value
    piece = plain(value)  # has a dim if a rank holds nothing of a parameter without dims
    return (True, piece.dtype) if piece.ndim and piece.shape == plain(p).shape else (False, piece.cpu())


def load_full_state(
    optimizer: optim.Optimizer, stored: Mapping[Tensor, Stored], full: dict[str, Any], comm: Comm
) -> None:
    """Loads the result of ``full_state``, or a single-device optimizer's ``state_dict``. Raises PlanError,
    before anything is changed, for the state of another optimizer."""
    check_optimizer_state(optimizer, full)
    params, places = params_of(optimizer), numbered(full)
    state = {}
    for n, entries in full["state"].items():
        p = params[places[n]]
        # copies, because load_state_dict would share step counters with the given state
        entries = {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries.items()}
        # a rank without a piece gets empty states: a fused step needs states for all parameters or for none
        state[n] = {k: _cut(k, v, stored[p], comm.rank, comm.device) for k, v in entries.items()}
        if isinstance(p, ShardTensor):
            state[n] = {k: _shown(v, p) for k, v in state[n].items()}
    try:
        optimizer.load_state_dict({"state": state, "param_groups": full["param_groups"]})
    except TypeError as error:
        raise PlanError(
            "the optimizer's state cannot be loaded",
            expected="what full_optimizer_state_dict or the optimizer's state_dict() gave",
            got=str(error),
        ) from None
