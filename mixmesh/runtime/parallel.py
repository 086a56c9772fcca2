"""``parallelize``: an ordinary model and optimizer, from now on one rank's part of a program.

The returned model is called like the original and returns the global loss, so a single-device training
loop runs unchanged under ``torchrun``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..ir import REPLICATE, Parts, Program, owned_type, stage_of
from ..plan_file import accumulation
from ..trace.compiled import uncompiled
from ..trace.dtypes import TORCH_DTYPE
from ..trace.hooks import check_gradient_hooks
from . import optimizers
from .allocator import steady_heap, trim_heap
from .calls import Calls
from .comm import Comm
from .gradients import Bucket, GradientReducer, assign_buckets
from .guards import Guards, wrapped_twice
from .layout import Layout
from .loss import LossSum
from .model_check import PlannedModel
from .node import Inner
from .optimizer_check import check_new_optimizers, check_optimizer, common_holders
from .original import TakenOver, take_over
from .outputs import Output
from .owned import Awaited, Owned, WholeParams
from .parallel_model import ParallelModel
from .passes import Runtime
from .pipeline import groups
from .random import RandomPolicy
from .shapes import Forms
from .shard_tensor import ShardTensor, plain, shard
from .shard_whole import Whole
from .shards import Stored, agree, stored_tensors
from .shells import parallel_class
from .start import check_values, start_together
from .whole_model import own_module

__all__ = [
    "Output", "ParallelModel", "full_optimizer_state_dict", "load_full_optimizer_state_dict", "parallelize",
    "planned_bytes",
]  # fmt: skip


def planned_bytes(plan: Any, comm: Comm) -> int:
    """The memory that a plan predicts for this process; 0 without a prediction, and on a GPU, whose
    allocator looks after itself."""
    peaks = () if isinstance(plan, Program) else plan.predicted_peak_memory_bytes
    return peaks[comm.rank] if peaks and comm.device.type == "cpu" else 0


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Any,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: float = 20.0,
    seed: int = 0,
    random_exact: bool = False,
    check_model: bool = True,
    kept_shapes: int = 16,
) -> tuple[ParallelModel, torch.optim.Optimizer | None]:
    """This process's part of ``model`` under a plan (or a Program). Collective.

    ``model`` is taken over, or the one within ``torch.compile(model)``: its own parameters and buffers are
    empty afterwards, and say so when they are used. The optimizer object stays the same, its parameters
    become those of the parallel model. All ranks start from rank 0's values. ``seed`` decides the random
    numbers of dropout; with ``random_exact`` they are those of the single device. At the first call rank 0
    traces the model once more, which takes seconds as it did in planning, and a model that was changed since
    is refused; ``check_model=False`` leaves that out. The model is traced again for every other shape of a
    batch, and to evaluate (``shapes``): ``kept_shapes`` such programs are kept.
    Raises PlanError if the model or the number of processes is not the plan's, InputError for an optimizer
    that cannot work on shards, or a model that is parallel already.
    """
    model = uncompiled(model)
    check_not_parallel(model, "parallelize")
    program = plan if isinstance(plan, Program) else plan.program
    check_values(model)
    watch = start_together(
        model, plan, seed=seed, device=device, timeout_s=timeout_s, heartbeat_s=heartbeat_s
    )
    check_gradient_hooks(model)
    stored = stored_tensors(program, model)
    if optimizer is not None:
        check_optimizer(optimizer, _of_params(stored, model), _learning(program), program.world_size)
    check_new_optimizers()
    samples = None if isinstance(plan, Program) else accumulation(plan)
    beside = () if samples is None else groups(program, samples)
    comm = Comm.create(program, beside, device=device, timeout_s=timeout_s, watch=watch)
    stored = {name: s.at(comm.rank) for name, s in stored.items()}
    if comm.device.type == "cpu":
        steady_heap()
    agree((t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, TakenOver)), comm)
    random = RandomPolicy(seed, exact=random_exact)
    options = dict(check_model=check_model, kept_shapes=kept_shapes)
    parallel = _take(model, optimizer, plan, comm, stored, random, **options)
    if watch is not None and optimizer is not None:
        watch.count_steps(optimizer)
    return parallel, optimizer


def check_not_parallel(model: nn.Module, function: str) -> None:
    """Raises InputError for a model that is parallel, or has one within it. ``function`` was given it."""
    if any(isinstance(module, ParallelModel) for module in model.modules()):
        raise wrapped_twice(function)


def _take(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Any,
    comm: Comm,
    stored: Mapping[str, Stored],
    random: RandomPolicy,
    *,
    check_model: bool,
    kept_shapes: int,
) -> ParallelModel:
    """A parallel model with the values of ``model``, which all ranks have alike, held as ``stored``."""
    program = plan if isinstance(plan, Program) else plan.program
    calls = Calls.of(model, plan)
    taken = _Taken(comm, stored, _owners(program, model))
    params = {name: taken.param(name, p) for name, p in model.named_parameters(remove_duplicate=False)}
    held_buffers = {name: taken.buffer(name, b) for name, b in model.named_buffers(remove_duplicate=False)}
    buckets = assign_buckets(program)
    taken.wholes = wholes = WholeParams(comm, *_groups(buckets, taken.owned_by_name(params)))
    owned = taken.owned_by_name(params)
    inner = {name: taken.inner[p] for name, p in params.items()}
    used = {name: owned[name].whole if name in owned else p for name, p in inner.items()}
    origins = {name: s.origin(comm.rank) for name, s in stored.items() if s.copies}
    reducer = GradientReducer(comm, buckets, used, owned, wholes.changed, origins)
    learning = {id(inner[name]) for name in _learning(program)}
    dtype = TORCH_DTYPE[program.types[program.loss].value.dtype]
    first_names = tuple({p: name for name, p in reversed(params.items())}[p] for p in taken.inner)
    runtime = Runtime(
        program,
        comm,
        calls,
        Forms.of(model, plan, calls, comm, kept_shapes),
        random,
        stored,
        {p: stored[name] for p, name in zip(taken.inner, first_names)},
        {},
        owned,
        wholes,
        torch.ones((), dtype=dtype, device=comm.device),
        planned_bytes(plan, comm),
        {**inner, **{name: Awaited(wholes, o.name, o.whole) for name, o in owned.items()}},
        reducer,
        LossSum(program, comm),
        Inner.of(taken.inner, learning, reducer),
        Guards.of(first_names, taken.inner, comm.device, getattr(plan, "autocast", None)),
        model,
        lambda twin: _take(
            twin, None, plan, comm, stored, copy.copy(random), check_model=False, kept_shapes=kept_shapes
        ),
        PlannedModel(model, plan) if check_model and getattr(plan, "graph_fingerprint", "") else None,
    )
    made = parallel_class(ParallelModel, type(own_module(model)))
    parallel = made(runtime, model, params, held_buffers)
    if optimizer is not None:
        _adapt(optimizer, taken, runtime, common_holders(stored[n] for n in _learning(program)))
    for whole, shown in taken.shown.items():
        if not isinstance(whole, TakenOver):
            take_over(whole, shown)
    if comm.device.type == "cpu":
        trim_heap(0)  # returns memory that setting up took
    return parallel


@dataclass
class _Taken:
    """The tensors of a model on their way into the parallel one: ``shown`` by the original's, ``inner`` by
    the shown parameter."""

    comm: Comm
    stored: Mapping[str, Stored]
    owners: Mapping[Tensor, tuple[Layout, int]]

    def __post_init__(self) -> None:
        self.shown: dict[Tensor, Tensor] = {}
        self.swapped: dict[Tensor, tuple[Tensor, Stored]] = {}
        self.inner: dict[nn.Parameter, nn.Parameter] = {}
        self.wholes: WholeParams | None = None
        self._owned: dict[nn.Parameter, Owned] = {}

    def param(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        if whole in self.shown:
            return self.shown[whole]
        stored, comm = self.stored[name], self.comm
        used_as, stage = self.owners.get(whole, (stored.held, 0))
        if isinstance(whole, TakenOver):
            shown = _shared(whole, stored, comm, is_owned=bool(stage))
            mine = nn.Parameter(plain(shown).detach(), requires_grad=whole.requires_grad)
        else:
            # a rank that does not use it holds no rows of it, and no elements
            held = replace(stored, held=used_as) if comm.rank in used_as.ranks else stored
            piece = held.piece(whole, comm.rank, comm.device)
            mine = nn.Parameter(piece, requires_grad=whole.requires_grad)
            written = None
            if stage and comm.rank in used_as.ranks:
                owned = Owned.of(name, mine, stored.held, used_as.ranks, comm.rank, stage)
                mine = owned.piece
            if stage:
                written = self._written
            shown = _show(mine, stored, comm, written)
            if stage and comm.rank in used_as.ranks:
                self._owned[shown] = owned
        self.shown[whole] = shown
        self.swapped[whole] = (shown, stored)
        self.inner[shown] = mine
        return shown

    def buffer(self, name: str, whole: Tensor) -> Tensor:
        if whole not in self.shown:
            stored, comm = self.stored[name], self.comm
            if isinstance(whole, TakenOver):
                self.shown[whole] = _shared(whole, stored, comm, is_owned=False)
            else:
                piece = stored.piece(whole, comm.rank, comm.device)
                self.shown[whole] = piece if _is_whole(stored, comm) else shard(piece, Whole(stored, comm))
        return self.shown[whole]

    def owned_by_name(self, params: Mapping[str, nn.Parameter]) -> dict[str, Owned]:
        return {name: self._owned[p] for name, p in params.items() if p in self._owned}

    def _written(self) -> None:
        self.wholes.changed()


def _is_whole(stored: Stored, comm: Comm) -> bool:
    """Whether every rank holds all of it."""
    return not (stored.held.sizes or stored.copies) and len(stored.held.ranks) == comm.world_size


def _show(mine: nn.Parameter, stored: Stored, comm: Comm, written) -> nn.Parameter:
    if _is_whole(stored, comm):
        return nn.Parameter(mine.detach(), requires_grad=mine.requires_grad)
    whole = Whole(stored, comm, written)
    return shard(mine, whole, is_parameter=True, requires_grad=mine.requires_grad)


def _shared(whole: TakenOver, stored: Stored, comm: Comm, *, is_owned: bool) -> Tensor:
    """The tensor that another parallel model shows for the same original. Raises InputError if this one would
    hold it otherwise: then there would be two, trained apart."""
    shown = whole.heir()
    if isinstance(shown, ShardTensor):
        alike = shown.whole.stored.held == stored.held and shown.whole.written is None
    else:
        alike = shown is not None and _is_whole(stored, comm)
    if not alike or is_owned:
        raise InputError(
            "two parallel models share a parameter or buffer, and their plans hold it differently"
            if shown is not None
            else "the model was taken over by parallelize before, and that parallel model is gone",
            expected=f"{stored.name} whole on every rank in both plans, or cut alike",
            got="" if shown is None else f"{stored.name}: another layout in this plan",
            hint=(
                'plan both with planner="ddp-proportional"',
                "one model whose forward returns the sum of both losses",
                "model.load_state_dict(parallel.full_state_dict()) makes the original whole again",
            ),
        )
    return shown


def _adapt(
    optimizer: torch.optim.Optimizer, taken: _Taken, runtime: Runtime, holders: tuple[int, ...] | None
) -> None:
    comm, wholes = runtime.comm, runtime.wholes
    optimizers.put_on_shards(optimizer, taken.swapped, comm.rank)
    optimizers.step_on_pieces(optimizer, holders, comm.rank)
    optimizers.show_shards(optimizer)
    optimizers.also_drop(optimizer, runtime.reducer.drop)
    if runtime.owned:
        inner = taken.inner

        def gather(stepped: torch.optim.Optimizer, *_) -> None:
            wholes.changed()
            wholes.start([inner.get(p, p) for p in optimizers.params_of(stepped)])

        optimizer.register_step_post_hook(gather)


def _owners(program: Program, model: nn.Module) -> dict[Tensor, tuple[Layout, int]]:
    """For each parameter with shard owners: the layout in which it is used, and the ZeRO stage."""
    params = dict(model.named_parameters(remove_duplicate=False))
    return {
        params[i.args[0]]: (Layout(REPLICATE, program.participants(i.type)), stage_of(i))
        for i in program.params
        if owned_type(program, i) is not None
    }


def _groups(buckets: Sequence[Bucket], owned: Mapping[str, Owned]) -> tuple[list[list[Owned]], list[Parts]]:
    """The parameters that are gathered together, in the order of first use: the buckets of owned ones, from
    the last that the backward pass completes. With each, its ranks by machine, if it is gathered by
    levels."""
    groups, parts = [], []
    for bucket in reversed(buckets):
        members = list({id(owned[n]): owned[n] for n in bucket.names if n in owned}.values())
        if members:
            groups.append(members)
            parts.append(bucket.parts)
    return groups, parts


def full_optimizer_state_dict(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` as on a single device, the same on all ranks. Collective."""
    return optimizers.full_state(optimizer, model._runtime.by_param, model.comm)


def load_full_optimizer_state_dict(
    model: ParallelModel, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Loads what ``full_optimizer_state_dict``, or the optimizer of a single device, gave."""
    optimizers.load_full_state(optimizer, model._runtime.by_param, state, model.comm)


def _learning(program: Program) -> list[str]:
    """Names of the parameters that get gradients."""
    return [p.args[0] for p in program.params if p.result in program.requires_grad]


def _of_params(stored: Mapping[str, Stored], model: nn.Module) -> dict[str, Stored]:
    return {name: stored[name] for name, _ in model.named_parameters()}
