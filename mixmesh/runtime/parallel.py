"""``parallelize``: turns an ordinary model and optimizer into one rank's part of a program.

The returned model is called like the original and returns the global loss, so a single-device training loop
runs unchanged under ``torchrun``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..base.progress import warn_once
from ..frontend.trace.compiled import uncompiled
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..frontend.trace.hooks import check_gradient_hooks
from ..frontend.trace.reads import reads_of
from ..lang.ir import Parts, Program
from ..lang.plan_file import accumulation
from . import optimizers
from .allocator import HeapLimit, steady_heap, trim_heap
from .calls import Calls
from .comm import Comm
from .drift import DriftWatch, read_buffers
from .gradients import Bucket, GradientReducer, assign_buckets
from .guards import Guards, wrapped_twice
from .left_tensors import left_of, refuse_left
from .loss import LossSum
from .model_check import PlannedModel, check_can_compare
from .node import Inner, runs_alone
from .optimizer_check import check_holds_only, check_new_optimizers, check_optimizer, common_holders
from .original import TakenOver, take_over
from .outputs import Output
from .overlaps import check_apart
from .owned import Awaited, Owned, WholeParams
from .parallel_model import ParallelModel
from .passes import Runtime
from .pipeline import groups
from .random import RandomPolicy
from .segments import check_can_compile
from .shapes import Forms
from .shards import Stored, agree, stored_tensors
from .shells import parallel_class
from .start import check_can_follow, stand_in_for_meta, start_together
from .taken import Taken, owners_of
from .taking_part import taking_part
from .unsummed import refuse_steps
from .whole_model import own_module

__all__ = [
    "Output", "ParallelModel", "full_optimizer_state_dict", "load_full_optimizer_state_dict", "parallelize",
]  # fmt: skip


def heap_limit(plan: Any, comm: Comm) -> HeapLimit:
    """The limit of this process's heap by a plan's prediction; none for a program, and on a GPU, whose
    allocator needs none."""
    if isinstance(plan, Program) or comm.device.type != "cpu":
        return HeapLimit(0)
    peaks, usable = plan.predicted_peak_memory_bytes, plan.usable_bytes
    return HeapLimit.of_plan(peaks[comm.rank] if peaks else 0, usable[comm.rank] if usable else 0)


OptimizerOrNone = TypeVar("OptimizerOrNone", bound=torch.optim.Optimizer | None)


@taking_part("parallelize")
def parallelize(
    model: nn.Module,
    optimizer: OptimizerOrNone,
    plan: Any,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: float = 20.0,
    seed: int = 0,
    random_exact: bool = False,
    check_model: bool = True,
    kept_shapes: int = 64,
    compile: bool = False,
) -> tuple[ParallelModel, OptimizerOrNone]:
    """This process's part of ``model`` under a plan (or a Program). Collective.

    ``model``, or the one within ``torch.compile(model)``, is taken over: its own parameters and buffers are
    empty afterwards, and using them raises an error. The optimizer object stays the same; its parameters
    become those of the parallel model. All ranks start from rank 0's values. ``seed`` decides the random
    numbers of dropout; with ``random_exact`` they are those of the single device.

    At the first call rank 0 traces the model once more, which takes as many seconds as in planning, and
    refuses a model that has changed since; ``check_model=False`` skips this. The model is traced again for
    every other shape of a batch, and to evaluate (``shapes``): ``kept_shapes`` such programs are kept. With
    ``compile``, operators between collectives are compiled by ``torch.compile`` (``segments``) when a shape
    first occurs.

    If the model is on the device meta, no rank ever holds more than its pieces: ``checkpoint.load_weights``
    or ``load`` gives them values, and until then every use raises InputError.

    The first rank shows the plan's warnings as warnings at the script's line. Raises PlanError if the model
    or the number of processes is not the plan's, InputError for an optimizer that cannot work on shards, or a
    model that is parallel already.
    """
    model = uncompiled(model)
    check_not_parallel(model, "parallelize")
    check_holds_only(optimizer, set(model.parameters()))
    reads_of(model).renew()  # so that the first call notices changes since the model was planned
    program = plan if isinstance(plan, Program) else plan.program
    check_can_follow(model)
    check_can_compare(model, plan, check_model)
    watch = start_together(
        model, plan, seed=seed, device=device, timeout_s=timeout_s, heartbeat_s=heartbeat_s
    )
    check_gradient_hooks(model)
    stored = stored_tensors(program, model)
    check_apart(model, stored, program.world_size)
    if optimizer is not None:
        check_optimizer(optimizer, _of_params(stored, model), _learning(program), program.world_size)
    check_new_optimizers()
    samples = None if isinstance(plan, Program) else accumulation(plan)
    beside = () if samples is None else groups(program, samples)
    comm = Comm.create(program, beside, device=device, timeout_s=timeout_s, watch=watch)
    stored = {name: s.at(comm.rank) for name, s in stored.items()}
    if compile:
        check_can_compile(comm.device)
    if comm.device.type == "cpu":
        steady_heap()
    without_values = stand_in_for_meta(model)
    with_values = (t for name, t in _tensors(model) if name not in without_values)
    agree((t for t in with_values if not isinstance(t, TakenOver)), comm)
    random = RandomPolicy(seed, exact=random_exact)
    parallel = _take(
        model,
        optimizer,
        plan,
        comm,
        stored,
        random,
        check_model=check_model,
        kept_shapes=kept_shapes,
        compiles=compile,
    )
    parallel._runtime.without_values = tuple(without_values)
    if not comm.rank and not isinstance(plan, Program):
        for text in plan.warnings:
            warn_once(text)
    if watch is not None and optimizer is not None:
        watch.count_steps(optimizer)
    return parallel, optimizer


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_not_parallel(model: nn.Module, function: str) -> None:
    """Raises InputError for a model that is parallel, or contains one that is; the error names ``function``,
    to which it was given."""
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
    compiles: bool = False,
) -> ParallelModel:
    """A parallel model with the values of ``model``, which are the same on all ranks, held as ``stored``."""
    program = plan if isinstance(plan, Program) else plan.program
    taken = Taken(comm, stored, owners_of(program, model))
    runtime = runtime_of(
        taken, model, plan, random, check_model=check_model, kept_shapes=kept_shapes, compiles=compiles
    )
    kind: type = type(own_module(model))
    model_class = parallel_class(ParallelModel, kind)
    parallel = model_class(runtime, model, taken.params, taken.buffers)
    refuse_left(parallel, getattr(plan, "left", ()))
    runtime.left.hide()
    if optimizer is not None:
        _adapt(optimizer, taken, runtime, common_holders(stored[n] for n in _learning(program)))
    for whole, shown in taken.shown.items():
        if not isinstance(whole, TakenOver):
            take_over(whole, shown)
    if comm.device.type == "cpu":
        trim_heap()  # returns the memory that setting up took
    return parallel


def runtime_of(
    taken: Taken,
    model: nn.Module,
    plan: Any,
    random: RandomPolicy,
    *,
    check_model: bool,
    kept_shapes: int,
    compiles: bool = False,
) -> Runtime:
    """Everything that runs ``plan`` on the tensors of ``model``, which are ``taken``."""
    program = plan if isinstance(plan, Program) else plan.program
    comm, stored, calls = taken.comm, taken.stored, Calls.of(model, plan)
    taken.params = params = {
        name: taken.param(name, p) for name, p in model.named_parameters(remove_duplicate=False)
    }
    taken.buffers = {name: taken.buffer(name, b) for name, b in model.named_buffers(remove_duplicate=False)}
    buckets = assign_buckets(program)
    taken.wholes = wholes = WholeParams(comm, *_groups(buckets, taken.owned_by_name(params)))
    owned = taken.owned_by_name(params)
    inner = {name: taken.inner[p] for name, p in params.items()}
    used = {name: owned[name].whole if name in owned else p for name, p in inner.items()}
    origins = {name: s.origin(comm.rank) for name, s in stored.items() if s.copies}
    reducer = GradientReducer(comm, buckets, used, owned, wholes.changed, origins)
    learning = {id(inner[name]) for name in _learning(program)}
    dtype = TORCH_DTYPE[program.types[program.loss].value.dtype]
    is_checked = check_model and bool(getattr(plan, "graph_fingerprint", ""))
    first_names = tuple({p: name for name, p in reversed(params.items())}[p] for p in taken.inner)
    guards = Guards.of(first_names, taken.inner, comm.device, getattr(plan, "autocast", None))
    shown = dict(zip(first_names, taken.inner))
    drift = DriftWatch(comm, shown, stored, guards.tables.buffers, read_buffers(program))
    return Runtime(
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
        heap_limit(plan, comm),
        {**inner, **{name: Awaited(wholes, o.name, o.whole) for name, o in owned.items()}},
        reducer,
        LossSum(program, comm),
        Inner.of(taken.inner, learning, reducer, comm, drift.acts, plan),
        guards,
        model,
        params if runs_alone(program, taken.inner, comm) else None,
        lambda twin: _take(
            twin,
            None,
            plan,
            comm,
            stored,
            copy.copy(random),
            check_model=False,
            kept_shapes=kept_shapes,
            compiles=compiles,
        ),
        drift,
        PlannedModel(model, plan) if is_checked else None,
        compiles=compiles,
        left=left_of(model, getattr(plan, "left", ()), own=own_module(model)),
    )


def _adapt(
    optimizer: torch.optim.Optimizer, taken: Taken, runtime: Runtime, holders: tuple[int, ...] | None
) -> None:
    comm = runtime.comm
    runtime.drift.optimizer = optimizer
    optimizer.register_step_pre_hook(lambda *_: runtime.drift.before_step())
    optimizer.register_step_post_hook(lambda *_: runtime.drift.after_step())
    optimizers.put_on_shards(optimizer, taken.swapped, comm.rank)
    optimizers.step_on_pieces(optimizer, holders, comm.rank)
    optimizers.show_shards(optimizer)
    # looks up the runtime, whose parts change with the shares
    optimizers.also_drop(optimizer, lambda: runtime.drop_gradients())
    refuse_steps(optimizer, lambda: runtime.reducer.is_unsummed)
    if runtime.owned:

        def gather(stepped: torch.optim.Optimizer, *_) -> None:
            inner: dict[Tensor, Tensor] = dict(zip(runtime.node.shown, runtime.node.inner))
            runtime.wholes.changed()
            runtime.wholes.start([inner.get(p, p) for p in optimizers.params_of(stepped)])

        optimizer.register_step_post_hook(gather)


def _groups(buckets: Sequence[Bucket], owned: Mapping[str, Owned]) -> tuple[list[list[Owned]], list[Parts]]:
    """The parameters that are gathered together, in the order of first use: the buckets of owned parameters,
    starting with the last one that the backward pass completes. Also, for each bucket that is gathered
    hierarchically, its ranks by machine."""
    groups, parts = [], []
    for bucket in reversed(buckets):
        members = list({id(owned[n]): owned[n] for n in bucket.names if n in owned}.values())
        if members:
            groups.append(members)
            parts.append(bucket.parts)
    return groups, parts


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` as on a single device, the same on all ranks. Collective. If ``model`` is
    not parallel, as ``prepare`` returns it on one device, that is the optimizer's own. Raises InputError for
    an optimizer of another model."""
    if not isinstance(model, ParallelModel):
        return optimizer.state_dict()
    return optimizers.full_state(optimizer, model._runtime.by_param, model.comm)


def load_full_optimizer_state_dict(
    model: ParallelModel, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Loads a state made by ``full_optimizer_state_dict``, or by an optimizer on a single device."""
    optimizers.load_full_state(optimizer, model._runtime.by_param, state, model.comm)


def _learning(program: Program) -> list[str]:
    """The names of the parameters that get gradients."""
    return [p.args[0] for p in program.params if p.result in program.requires_grad]


def _of_params(stored: Mapping[str, Stored], model: nn.Module) -> dict[str, Stored]:
    return {name: stored[name] for name, _ in model.named_parameters()}
