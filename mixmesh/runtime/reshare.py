"""Gives a model in training new shares: from one step to the next, the same program has other ratios.

The pieces of parameters, buffers and optimizer state move from their old ranks to their new ones, one tensor
at a time. All objects stay: the model, its parameters, the optimizer with its groups and hooks, and a
learning rate scheduler on it. Everything that runs the program on them is made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..errors import InputError, MixmeshError, PlanError
from ..frontend.job import is_elementwise
from ..lang.ir import Program, owned_type, support
from ..lang.plan_file import Plan, accumulation
from .allocator import trim_heap
from .comm import Comm
from .first_rank import everyones
from .layout import Layout, layout, meetings, route
from .optimizers import params_of
from .parallel import ParallelModel, runtime_of
from .passes import Runtime
from .redistribute import between
from .shard_tensor import plain
from .shards import Stored, stored_tensors
from .taken import Before, Taken, owners_of

HINT = "mixmesh run --checkpoint DIR goes on under any plan, in another start"


def why_other_form(old: Plan, new: Plan, optimizer: optim.Optimizer) -> str:
    """The reason why a training under ``old`` cannot continue under ``new`` in place; empty if it can."""
    one, two = old.program, new.program
    if replace(one, ratios=()) != replace(two, ratios=()):
        return "it is another program"
    names = [name for name, _ in one.ratios]
    if names != [name for name, _ in two.ratios] or any(
        support(ratio) != support(two.ratio_of[name]) for name, ratio in one.ratios
    ):
        return "other ranks take part"
    if old.order is not None or (old.micro_batches is None) != (new.micro_batches is None):
        return "it is a pipeline" if old.order is not None else "its steps are other micro-batches"
    try:
        accumulation(new)
    except PlanError as error:
        return error.message
    if not is_elementwise(optimizer) and moved_params(one, two):
        return f"{type(optimizer).__name__} keeps state that is no piece of what is like its parameter"
    return ""


def moved_params(one: Program, two: Program) -> list[str]:
    """Names of the parameters whose pieces differ between the programs."""

    def held(program: Program, n: int) -> Layout:
        i = program.params[n]
        return layout(program, owned_type(program, i) or i.type)

    pairs = range(len(one.params))
    return list(dict.fromkeys(one.params[n].args[0] for n in pairs if held(one, n) != held(two, n)))


@torch.no_grad()
def change_shares(model: ParallelModel, optimizer: optim.Optimizer, plan: Plan) -> None:
    """Makes ``model`` and its ``optimizer`` continue under ``plan``, which has the same program with other
    shares. Call it between two steps, after gradients were set to None. Collective.

    Raises PlanError, before anything is changed, for a plan of another form (``why_other_form``), InputError
    while there are gradients, or while the whole model is lent.
    """
    run = model._runtime
    if reason := why_other_form(run.forms.plan, plan, optimizer):
        raise PlanError(
            f"shares cannot be changed to those of this plan: {reason}",
            expected="the same program with other ratios of the same ranks",
            hint=HINT,
        )
    check_idle(run, optimizer)
    with run.comm.call("change of shares"):
        run.wholes.finish()
        stored = stored_tensors(plan.program, run.original)
        stored = {name: s.at(run.comm.rank) for name, s in stored.items()}
        run.comm.add((*meetings(plan.program), *groups_of(run.stored, stored)))
        _move_state(run, optimizer, stored)
        before = {**_moved_params(run, stored), **_moved_buffers(model, run, stored)}
        stored_anew = Taken(run.comm, stored, owners_of(plan.program, run.original), before)
        runtime = runtime_of(
            stored_anew,
            run.original,
            plan,
            run.random,
            check_model=False,
            kept_shapes=run.forms.limit,
            compiles=run.compiles,
        )
        runtime.forms = replace(runtime.forms, modes=run.forms.modes, unread=run.forms.unread)
        runtime.seed, runtime.unchecked = run.seed, run.unchecked
        runtime.drift.optimizer = run.drift.optimizer
        runtime.before_call, runtime.num_zeroed = run.before_call, run.num_zeroed
        runtime.followed = run.followed
        vars(run).update(vars(runtime))
        run.wholes.changed()
        if run.comm.device.type == "cpu":
            trim_heap()


def check_idle(run: Runtime, optimizer: optim.Optimizer) -> None:
    """Raises InputError if anything is under way that depends on the old shares."""
    shown = (*run.node.shown, *run.node.inner, *params_of(optimizer))
    under_way = ""
    if any(p.grad is not None for p in shown):
        under_way = "gradients"
    elif any(True for _ in run.loans):
        under_way = "the whole model, which is lent"
    elif run.recorder is not None:
        under_way = "a recording"
    if under_way:
        raise InputError(
            f"shares are changed between two steps, and there are still {under_way}",
            expected="optimizer.zero_grad() before, and no model.whole() or recording around it",
            got=under_way,
        )


def groups_of(old: Mapping[str, Stored], new: Mapping[str, Stored]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """The groups of ranks between which pieces move, on all ranks in one order."""
    for name, before in old.items():
        after = new[name]
        for src, dst in zip(before.copies or (before.held,), after.copies or (after.held,)):
            yield from (("data", step.ranks) for step in route(src, dst) if step.ranks)


def _moved(comm: Comm, what: str, piece: Tensor, old: Stored, new: Stored) -> Tensor:
    """This rank's new piece of a tensor that is held as ``new`` from now on. Collective."""
    if old.held == new.held or comm.rank not in {*old.held.ranks, *new.held.ranks}:
        return piece
    how = between(comm, f"moving {what} to its new shares", old.shape, piece.dtype, old.held, new.held)
    moved = how.forward(piece.contiguous())
    assert moved is not None  # why_other_form has checked that the same ranks have shares as before
    return moved


def _moved_params(run: Runtime, stored: Mapping[str, Stored]) -> dict[Tensor, Before]:
    """The new piece of each shown parameter. For an owned one, whose rows lie in a working copy of the whole,
    only the program's tensor."""
    owned = {id(o.piece): o for o in run.owned.values()}
    before: dict[Tensor, Before] = {}
    for shown, inner in zip(run.node.shown, run.node.inner):
        old = run.by_param[shown]
        if id(inner) in owned:
            before[shown] = Before(inner.detach(), owned[id(inner)].whole)
        else:
            piece = _moved(run.comm, old.name, plain(shown).detach(), old, stored[old.name])
            before[shown] = Before(piece, inner)
    return before


def _moved_buffers(model: nn.Module, run: Runtime, stored: Mapping[str, Stored]) -> dict[Tensor, Before]:
    before: dict[Tensor, Before] = {}
    for name, shown in model.named_buffers():
        piece = _moved(run.comm, name, plain(shown).detach(), run.stored[name], stored[name])
        before[shown] = Before(piece, shown)
    return before


def _move_state(run: Runtime, optimizer: optim.Optimizer, stored: Mapping[str, Stored]) -> None:
    """Moves all optimizer states that have the shape of a parameter whose pieces move. A rank that had no
    piece, and so no state, gets the plain values of the others."""
    moving = [p for p in params_of(optimizer) if run.by_param[p].held != stored[run.by_param[p].name].held]
    # a rank of another copy of a parameter takes part too: whether anything moves is the same on all
    if not any(_differ(old, stored[name]) for name, old in run.stored.items()):
        return
    mine = {
        run.by_param[p].name: {k: _outline(v, p) for k, v in optimizer.state.get(p, {}).items()}
        for p in moving
    }
    told = everyones(mine)
    for p in moving:
        old = run.by_param[p]
        new = stored[old.name]
        # only the ranks that hold this copy of the parameter
        ranks = sorted({*old.held.ranks, *new.held.ranks})
        if run.comm.rank not in ranks:
            continue
        old_state = next((told[r][old.name] for r in ranks if told[r].get(old.name)), {})
        entries: dict[str, Any] = dict(optimizer.state.get(p, {}))
        for key, (dtype, value) in old_state.items():
            if dtype is None:
                entries.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
                continue
            piece = entries.get(key)
            if piece is None:
                piece = torch.zeros(plain(p).shape, dtype=dtype, device=run.comm.device)
            entries[key] = _moved(run.comm, f"{key} of {old.name}", plain(piece), old, new)
        if entries:
            optimizer.state[p] = entries


def _differ(old: Stored, new: Stored) -> bool:
    return (old.copies, old.copies or old.held) != (new.copies, new.copies or new.held)


def _outline(value: Any, p: Tensor) -> tuple[torch.dtype | None, Any]:
    """The dtype of a state that has the shape of its parameter; for any other state None and its value."""
    if not isinstance(value, Tensor):
        return None, value
    piece = plain(value)  # has a dim if a rank holds nothing of a parameter without dims
    if piece.ndim and piece.shape == plain(p).shape:
        return piece.dtype, None
    if piece.ndim:
        raise MixmeshError(
            "a state of the optimizer is neither a number nor like its parameter",
            expected=f"a tensor of shape {list(plain(p).shape)}, or one without dims",
            got=f"one of shape {list(piece.shape)}",
            hint="mixmesh run --no-rebalance",
        )
    return None, piece
