"""Checks that an optimizer can step the ranks' parts of the parameters. It does so when the optimizer is
handed to ``parallelize`` or made from a parallel model's parameters, because an error in the first step would
come too late.

An optimizer that treats every element by itself can step pieces. Others need whole parameters: they can step
if the same ranks hold all of them whole. If parameters are cut, the optimizer is tried on small shards that
refuse any access to elements of other ranks: LAMB asks for norms of whole parameters, which shards know;
Adafactor averages along rows, which they do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, optim

from ..base.patch import put_on
from ..errors import InputError
from ..frontend.job import ELEMENTWISE, can_step_pieces, check_supported, is_elementwise
from ..lang.ir import REPLICATE
from .comm import Comm
from .layout import Layout
from .shard_tensor import ShardTensor, shard
from .shard_whole import Whole
from .shards import Stored

TRIAL_SIZE = 4  # size of every dim of the parameters in a trial step


def check_optimizer(
    optimizer: optim.Optimizer, stored: Mapping[str, Stored], learning: Iterable[str], world_size: int
) -> None:
    """Raises InputError for an optimizer that cannot step the parameters of a model as they are ``stored``.
    The parameters named in ``learning`` get gradients."""
    kind = type(optimizer).__name__
    check_supported(optimizer)
    if can_step_pieces(optimizer):
        return
    cut = [s.name for s in stored.values() if s.num_pieces]
    if cut:
        raise _refusal(kind, "cut", cut)
    spread = [stored[n] for n in learning if not stored[n].is_everywhere(world_size)]
    if spread and common_holders(stored[n] for n in learning) is None:
        dims = {len(s.shape) for s in spread}
        if _fails_on_shards(optimizer, dims):
            raise _refusal(kind, "held by some ranks alone", [s.name for s in spread])


def check_can_be_prepared(optimizer: Any) -> None:
    """Raises InputError for an object that PyTorch's ``Optimizer.__init__`` has not initialised, such as a
    wrapper of an optimizer."""
    # the last that Optimizer.__init__ sets: wrappers such as timm's Lookahead make the first by themselves
    if optimizer is None or hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        return
    kind = type(optimizer).__name__
    if isinstance(optimizer, (list, tuple, dict)):
        raise InputError(
            "prepare takes one optimizer",
            expected="a torch.optim.Optimizer, or None",
            got=f"a {kind} of {len(optimizer)}",
            hint=(
                "model, _, loader = mixmesh.prepare(model, None, loader), and then each optimizer of the "
                "parameters of the model that is returned",
            ),
        )
    raise InputError(
        f"{kind} is not made as an optimizer of PyTorch is",
        expected="a torch.optim.Optimizer whose __init__ calls that of Optimizer",
        got=f"{kind}, without what Optimizer.__init__ makes",
        hint=(
            f"prepare the optimizer within it, and then make {kind} of the one that is returned: "
            f"model, base, loader = mixmesh.prepare(model, base, loader), optimizer = {kind}(base)",
        ),
    )


def check_holds_only(optimizer: optim.Optimizer | None, params: Container[Tensor]) -> None:
    """Raises InputError if an optimizer holds a parameter that is none of ``params``, those of the model."""
    if optimizer is None:
        return
    kind = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p not in params:
                raise InputError(
                    "the optimizer holds a parameter that is not the model's",
                    expected="parameters of this model alone",
                    got=f"a parameter of shape {list(p.shape)} in param_groups[{number}]",
                    hint=(
                        f"another {kind} with the same settings for what is outside of the model, both of "
                        "which step: another model has its own mixmesh.prepare",
                        "or one module that holds all of them; parameters of the loss may be those of a "
                        "module criterion: mixmesh.prepare(..., loss=criterion)",
                    ),
                )


def common_holders(stored: Iterable[Stored]) -> tuple[int, ...] | None:
    """The ranks that hold all of these tensors whole while other ranks hold no part of them; None if there
    are none."""
    holders = set(map(_holders, stored))
    return next(iter(holders)) if len(holders) == 1 else None


def _holders(stored: Stored) -> tuple[int, ...] | None:
    held = stored.counted
    if stored.num_pieces or len(stored.copies) > 1:
        return None
    return tuple(rank for rank, size in enumerate(held.sizes) if size) if held.sizes else held.ranks


def check_new_optimizers() -> None:
    """Makes optimizers that are created from shards report at once if they cannot step them, as far as that
    can be tried. An optimizer whose class sets further attributes after ``__init__`` reports it in its first
    step."""
    add = optim.Optimizer.add_param_group
    if hasattr(add, "checks_shards"):
        return

    @wraps(add)
    def add_param_group(self: optim.Optimizer, param_group: dict) -> None:
        add(self, param_group)
        shards = [p for p in self.param_groups[-1]["params"] if isinstance(p, ShardTensor)]
        if shards and not is_elementwise(self) and _fails_on_shards(self, {p.ndim for p in shards}):
            raise _refusal(type(self).__name__, "cut", [p.whole.stored.name for p in shards])

    put_on(add_param_group, "checks_shards", True)
    put_on(optim.Optimizer, "add_param_group", add_param_group)


def _fails_on_shards(optimizer: optim.Optimizer, dims: set[int]) -> bool:
    """Whether shards refuse a trial step of an optimizer like this one, without state. Any other error only
    means that the trial differs from the real optimizer."""
    trial = object.__new__(type(optimizer))
    groups = [
        {**group, "params": [_trial_shard(n) for n in sorted(dims)]} for group in optimizer.param_groups
    ]
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # without the hooks that every optimizer has
    try:
        trial.__setstate__(
            {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
        )
        step(trial)
    except InputError:
        return True
    except Exception:
        return False
    return False


def _trial_shard(num_dims: int) -> Tensor:
    """A shard with a gradient that one rank holds, and which needs no other rank."""
    alone = Comm(rank=0, world_size=1, device=torch.device("cpu"), timeout_s=0.0, groups={})
    shape = (TRIAL_SIZE,) * num_dims
    whole = Whole(Stored("trial", shape, torch.float32, Layout(REPLICATE, (0,))), alone)
    p = shard(torch.ones(shape), whole, is_parameter=True, requires_grad=True)
    p.grad = shard(torch.full(shape, 0.5), whole)
    return p


def _refusal(kind: str, how: str, names: list[str]) -> InputError:
    return InputError(
        f"{kind} may mix the elements of a parameter, and the plan has {len(names)} that are {how}",
        expected=f"an elementwise optimizer: {', '.join(ELEMENTWISE)}, or a class of your own that steps "
        "pieces of a parameter as it steps the whole",
        got=f"{kind}; parameters {how}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}",
        hint='a plan that keeps parameters whole on every rank: planner="ddp-proportional"',
    )
