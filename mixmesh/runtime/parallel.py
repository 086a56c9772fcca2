"""``parallelize``: an ordinary model and optimizer, from now on one rank's part of a program.

The returned model is called like the original and returns the global loss, so a single-device training
loop runs unchanged under ``torchrun``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, MixmeshError, PlanError
from ..ir import REPLICATE, Parts, Program, owned_type, stage_of
from ..ir.recompute import buffers_kept_for_backward
from ..plan_file import accumulation
from ..timeline import bucket_name, parameters_name
from ..trace.dtypes import TORCH_DTYPE
from ..trace.hooks import check_gradient_hooks
from . import optimizers
from .allocator import steady_heap, trim_heap
from .batches import local_inputs
from .calls import Calls
from .collectives import Handle, all_reduce, then
from .comm import Comm
from .executor import RankProgram, compile_program, local_piece
from .gradients import Bucket, GradientReducer, Sums, assign_buckets
from .hooks import HookWatch
from .layout import Layout
from .micro_steps import Earlier, MicroSteps, next_seed
from .owned import Awaited, Owned, WholeParams
from .pipeline import groups, stage_inputs
from .random import RandomPolicy
from .recording import RecordedComm, Recorder, recorded
from .scaler import refuse_plain_scaler
from .shards import Stored, agree, stored_tensors
from .window import Window


@dataclass(frozen=True)
class Output:
    """What a model that returned an object with ``.loss`` returns now."""

    loss: Tensor

    def __getitem__(self, key: str | int) -> Tensor:
        if key in ("loss", 0):
            return self.loss
        raise KeyError(key)


@dataclass(frozen=True)
class _Forward:
    """What a forward pass leaves: this rank's addend of the loss with its graph (None if it has none) and
    the tokens, the addend's value, and the gradients of earlier micro-steps."""

    local: Tensor | None
    tokens: list[Tensor]
    value: Tensor
    earlier: Earlier | None = None


@dataclass
class _Runtime:
    """Everything of a ParallelModel that is not a module: kept in one attribute, out of the way of the
    model's own names."""

    program: Program
    comm: Comm
    calls: Calls
    random: RandomPolicy
    stored: dict[str, Stored]  # by every name
    by_param: dict[Tensor, Stored]
    compiled: dict[tuple, RankProgram]  # by training, and the samples of a micro-step
    output_has_loss: bool
    owned: dict[str, Owned]  # by every name
    wholes: WholeParams
    steps: MicroSteps | None  # None: one step
    seed: Tensor  # of the loss's gradient: the last one
    planned_bytes: int  # what this process may hold as planned; 0 where that is not known
    kept_buffers: frozenset[str]  # updated in place while the backward pass may read their old values
    reducer: GradientReducer | None = None
    recorder: Recorder | None = None
    hooks: HookWatch | None = None


class ParallelModel(nn.Module):
    """This rank's part of a model: its shards under the model's own names, and how to run them.

    Gradients are exact for the loss it returns. A term added to that loss outside of the model (a
    penalty on the parameters, for instance) is not part of the program and would count once per rank:
    put it into the model.
    """

    def __init__(self, runtime: _Runtime, model: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._runtime = runtime
        rank, device = runtime.comm.rank, runtime.comm.device
        transient = _transient_buffers(model)
        cut: dict[int, Tensor] = {}
        for name, p in params.items():
            _owner(self, name).register_parameter(name.rpartition(".")[2], p)
        for name, whole in model.named_buffers(remove_duplicate=False):
            if id(whole) not in cut:
                cut[id(whole)] = runtime.stored[name].piece(whole, rank, device)
            leaf = name.rpartition(".")[2]
            _owner(self, name).register_buffer(leaf, cut[id(whole)], persistent=name not in transient)
        self.train(model.training)
        self.register_load_state_dict_post_hook(lambda *_: runtime.wholes.changed())

    @property
    def program(self) -> Program:
        return self._runtime.program

    @property
    def comm(self) -> Comm:
        return self._runtime.comm

    @property
    def source(self) -> str:
        """What this rank runs, as Python."""
        return self._compiled().source

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | Output:
        """The loss of the whole batch, on every rank. Inputs are whole batches or this rank's parts."""
        done = self._run(args, kwargs)
        loss = self._rooted(self._total(done.value).wait(), done)
        return Output(loss) if self._runtime.output_has_loss else loss

    def forward_local(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Handle]:
        """This rank's addend of the loss, to call ``backward`` on, and a handle whose ``wait()`` gives
        the global loss. Does not wait for other ranks."""
        done = self._run(args, kwargs)
        return self._rooted(done.value.clone(), done), self._total(done.value)

    def _run(self, args, kwargs) -> _Forward:
        run = self._runtime
        _check_autocast(run.comm.device)
        run.hooks.check(self)
        if run.planned_bytes and self.training:
            run.planned_bytes = trim_heap(run.planned_bytes)
        tensors = run.calls.tensors(args, kwargs)
        if run.steps is not None and run.steps.is_pipeline:
            number = len(run.steps.sizes)
            inputs = stage_inputs(run.program, run.steps.samples, tensors, run.comm, number)
        else:
            inputs = local_inputs(run.program, tensors, run.comm.rank, run.comm.device)
        params: dict[str, Any] = dict(self.named_parameters(remove_duplicate=False))
        params.update({name: Awaited(run.wholes, o.name, o.whole) for name, o in run.owned.items()})
        buffers = dict(self.named_buffers(remove_duplicate=False))
        read = buffers
        if torch.is_grad_enabled():
            # the forward pass ends with new values in place, and autograd may have saved the old ones
            read = buffers | {name: buffers[name].clone() for name in run.kept_buffers}
        run.random.step += 1
        run.wholes.start()
        if run.steps is None:
            local, updated, tokens = self._compiled().run(params, read, inputs)
            done = _Forward(local, tokens, self._zero() if local is None else local.detach())
        else:
            done, updated = self._accumulate(run.steps, params, read, inputs)
        run.wholes.finish()
        with torch.no_grad():
            for name, value in updated.items():
                buffers[name].copy_(local_piece(value, run.stored[name].held, run.comm.rank))
        return done

    def _accumulate(self, steps: MicroSteps, params, buffers, inputs) -> tuple[_Forward, dict[str, Tensor]]:
        """All micro-steps, and the backward passes of all but the last (see ``micro_steps``)."""
        run = self._runtime
        if steps.once is not None:
            with torch.no_grad():
                _, given, _ = self._compiled(once=True).run(params, buffers, inputs)
            inputs = {**inputs, **given}
        learns = torch.is_grad_enabled()
        before = run.reducer.take() if learns else None
        if steps.is_pipeline:
            last = partial(run.reducer.early, before) if learns else nullcontext
            value, updated = self._pipeline(steps, params, buffers, inputs, last)
            earlier = None
            if learns:
                earlier = Earlier(run.reducer, run.seed)
                run.reducer.put_back(before)
            return _Forward(None, [], value, earlier), updated
        value, start = self._zero(), 0
        for number, size in enumerate(steps.sizes):
            run.random.micro_step, run.random.first_sample = number, steps.first_sample + start
            part = steps.cut(inputs, start, size)
            local, updated, tokens = self._compiled(size).run(params, buffers, part)
            own = self._zero() if local is None else local.detach()
            value = value + own
            start += size
            if learns and number + 1 < len(steps.sizes):
                with run.reducer.summing(steps.sums):
                    self._rooted(own, _Forward(local, tokens, own)).backward(run.seed)
                del local, tokens  # what is left of its graph must not live beside the next one
            del part
        run.random.micro_step = 0
        earlier = None
        if learns:
            earlier = Earlier(run.reducer, run.seed)
            run.reducer.put_back(before)
        return _Forward(local, tokens, value, earlier), updated

    def _pipeline(
        self, steps: MicroSteps, params, buffers, inputs, last: Callable[[], AbstractContextManager]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All passes of this rank's stage, the last backward pass within ``last``: the value of its addend of
        the loss, and new values of buffers."""
        run, size, count = self._runtime, steps.sizes[0], len(steps.sizes)
        value, updated = self._zero(), {}
        if steps.stage is None:
            return value, updated

        def forward(number: int, received: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
            nonlocal value, updated
            run.random.micro_step = number
            run.random.first_sample = steps.samples.first_sample(run.comm.rank, number * size, count)
            part = {**steps.cut(inputs, number * size, size), **received}
            handed: dict[str, Tensor] = {}
            local, updated, _ = self._compiled(size).run(params, buffers, part, handed)
            if local is not None:
                value = value + local.detach()
            return local, handed

        leave = (lambda: None) if run.recorder is None else run.recorder.leave
        seed = run.seed if torch.is_grad_enabled() else None
        steps.stage.run(run.comm, forward, seed, last, leave)
        run.random.micro_step = 0
        return value, updated

    def _compiled(self, size: int | None = None, *, once: bool = False) -> RankProgram:
        run, steps = self._runtime, self._runtime.steps
        if steps is not None and size is None and not once:
            size = steps.sizes[0]
        key = (self.training, size, once)
        if key not in run.compiled:
            updates = [i for i in run.program.instructions if i.op == "update"]
            if not self.training and updates:
                raise MixmeshError(
                    "the program was planned for training and updates buffers: it cannot evaluate",
                    got=f"an update of {updates[0].args[0]}, and model.training = False",
                    hint="load model.full_state_dict() into the original model and evaluate that",
                )
            program = run.program if steps is None else steps.once if once else steps.program
            run.compiled[key] = compile_program(
                program,
                run.comm.rank,
                run.comm,
                run.comm.device,
                run.random,
                training=self.training,
                sink=run.reducer.sink,
                receiver=run.reducer,
                recorder=run.recorder,
                window=None if size is None else Window(steps.samples, size, run.random),
            )
        return run.compiled[key]

    def _zero(self) -> Tensor:
        dtype = TORCH_DTYPE[self.program.types[self.program.loss].value.dtype]
        return torch.zeros((), dtype=dtype, device=self.comm.device)

    def _total(self, value: Tensor) -> Handle:
        wide = value if value.dtype == torch.float64 else value.float()
        channel = self.comm.channel(self.comm.everyone, "all_reduce of the loss")
        handle = all_reduce(channel, wide, async_op=True)
        return then(lambda total: total.to(value.dtype), handle)

    def _rooted(self, value: Tensor, done: _Forward) -> Tensor:
        if not torch.is_grad_enabled():
            return value
        anchor = torch.empty(0, device=self.comm.device, requires_grad=True)
        return _Loss.apply(self._runtime, done.earlier, value, anchor, done.local, *done.tokens)

    def no_sync(self):
        """Within it, backward passes leave the gradients of replicated parameters unsummed, to be summed
        with those of the next pass outside: for gradient accumulation."""
        return self._runtime.reducer.summing(Sums.NONE)

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Within it, all that this rank computes and communicates is measured."""
        run = self._runtime
        before = run.comm, run.compiled, run.recorder
        run.comm, run.compiled, run.recorder = RecordedComm.of(run.comm, recorder), {}, recorder
        for size in set(run.steps.sizes) if run.steps else (None,):
            self._compiled(size)  # not in the first step that is measured

        result_of = {p.args[0]: p.result for p in reversed(self.program.params)}  # of copies the first

        def channel_of(channel, bucket, size_bytes):
            ranks = bucket.ranks if bucket.cells else ()
            name = bucket_name([result_of[param] for param in bucket.names], ranks)
            op = "all_reduce" if bucket.owned is None else "reduce_scatter"
            return recorded(channel, recorder, name, op, size_bytes)

        def gather_of(channel, group):
            name = parameters_name([result_of[o.name] for o in group])
            return recorded(channel, recorder, name, "all_gather", sum(o.whole.nbytes for o in group))

        try:
            with run.reducer.through(channel_of), run.wholes.through(gather_of):
                yield
        finally:
            run.comm, run.compiled, run.recorder = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their global norm is at most ``max_norm``; gives the norm before.

        As ``torch.nn.utils.clip_grad_norm_`` on the whole model. Collective.
        """
        comm, norm_type = self.comm, float(norm_type)
        local = []
        for p in self.parameters():
            stored = self._runtime.by_param[p]
            # a replicated gradient counts once, by the first rank that holds it
            if p.grad is not None and stored.counts(comm.rank):
                local.append(torch.linalg.vector_norm(p.grad.flatten().double(), norm_type))
        norms = torch.stack(local) if local else torch.zeros(1, dtype=torch.float64, device=comm.device)
        channel = comm.channel(comm.everyone, "all_reduce of the gradient norm")
        if math.isinf(norm_type):
            total = all_reduce(channel, norms.max(), op="max")
        else:
            total = all_reduce(channel, (norms**norm_type).sum()) ** (1 / norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(scale.to(p.grad.dtype))
        return total.to(torch.get_default_dtype())

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """The original model's ``state_dict``, on the CPU. Collective. With ``rank0_only`` the others get
        an empty one."""
        out: dict[str, Tensor] = {}
        wholes: dict[int, Tensor] = {}
        for name, mine in self.state_dict(keep_vars=True).items():
            if id(mine) not in wholes:
                whole = self._runtime.stored[name].whole(mine, self.comm)
                keep = self.comm.rank == 0 or not rank0_only
                wholes[id(mine)] = whole.cpu().clone() if keep else whole.new_empty(0)
            out[name] = wholes[id(mine)]
        return {} if rank0_only and self.comm.rank else out

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a ``state_dict`` of the original model; every rank passes it. Raises PlanError."""
        own, stored = self.state_dict(keep_vars=True), self._runtime.stored
        missing, extra = own.keys() - state.keys(), state.keys() - own.keys()
        wrong = [n for n in own.keys() & state.keys() if tuple(state[n].shape) != stored[n].shape]
        if missing or extra or wrong:
            raise PlanError(
                "the state is not of this model",
                expected=", ".join(sorted(missing)[:3]) or "no other names, and the model's shapes",
                got=", ".join(sorted({*extra, *wrong})[:3]),
            )
        for name, mine in own.items():
            mine.copy_(stored[name].piece(state[name], self.comm.rank, self.comm.device))
        self._runtime.wholes.changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; also of what ``no_sync`` has left of owned parameters, which the optimizer's own
        ``zero_grad`` does not see."""
        super().zero_grad(set_to_none)
        for o in self._runtime.owned.values():
            o.whole.grad = None


class _Loss(torch.autograd.Function):
    """Forward: the value given. Backward: a gradient for this rank's addend, which for a sum is its own."""

    @staticmethod
    def forward(ctx, runtime, earlier, value, anchor, local, *tokens):
        ctx.runtime, ctx.earlier = runtime, earlier
        ctx.has_local, ctx.num_tokens = local is not None, len(tokens)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        runtime = ctx.runtime
        runtime.reducer.begin()
        if ctx.earlier is not None:
            ctx.earlier.deliver(gradient)
            runtime.seed = next_seed(gradient, runtime.seed)
        return None, None, None, None, gradient if ctx.has_local else None, *(None,) * ctx.num_tokens


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
    seed: int = 0,
    random_exact: bool = False,
    consume: bool = False,
) -> tuple[ParallelModel, torch.optim.Optimizer | None]:
    """This process's part of ``model`` under a plan (or a Program). Collective.

    The optimizer object stays the same, its parameters become the shards. All ranks start from rank 0's
    values. ``seed`` decides the random numbers of dropout; with ``random_exact`` they are those of the
    single device. With ``consume`` the parameters of ``model`` are emptied as they are cut, so that the
    whole model is never held beside all the shards. Raises PlanError if the model or the number of
    processes is not the plan's, InputError for an optimizer that cannot work on shards, TraceError for a
    model with hooks on gradients.
    """
    program = plan if isinstance(plan, Program) else plan.program
    output_has_loss = False if isinstance(plan, Program) else getattr(plan, "output_has_loss", False)
    check_gradient_hooks(model)
    stored = stored_tensors(program, model)
    if optimizer is not None:
        optimizers.check_optimizer(optimizer, _of_params(stored, model))
    samples = None if isinstance(plan, Program) else accumulation(plan)
    beside = () if samples is None else groups(program, samples)
    comm = Comm.create(program, beside, device=device, timeout_s=timeout_s)
    stored = {name: s.at(comm.rank) for name, s in stored.items()}
    if comm.device.type == "cpu":
        steady_heap()
    steps = MicroSteps.of(plan, comm.rank)
    agree([*model.parameters(), *model.buffers()], comm)
    swapped: dict[Tensor, tuple[Tensor, Stored]] = {}
    params: dict[str, nn.Parameter] = {}
    owners = _owners(program, model)
    owned: dict[str, Owned] = {}
    for name, whole in model.named_parameters(remove_duplicate=False):
        if whole not in swapped:
            used_as, stage = owners.get(whole, (stored[name].held, 0))
            piece = replace(stored[name], held=used_as).piece(whole, comm.rank, comm.device)
            mine = nn.Parameter(piece, requires_grad=whole.requires_grad)
            if stage and comm.rank in used_as.ranks:
                owned[name] = Owned.of(name, mine, stored[name].held, used_as.ranks, comm.rank, stage)
                mine = owned[name].piece
            swapped[whole] = (mine, stored[name])
            if consume:
                whole.data = whole.new_empty(0)
        params[name] = swapped[whole][0]
    shown = {id(o.piece): o for o in owned.values()}
    owned = {name: shown[id(p)] for name, p in params.items() if id(p) in shown}
    by_param = dict(swapped.values())
    random = RandomPolicy(seed, exact=random_exact)
    buckets = assign_buckets(program)
    wholes = WholeParams(comm, *_groups(buckets, owned))
    dtype = TORCH_DTYPE[program.types[program.loss].value.dtype]
    seed_ = torch.ones((), dtype=dtype, device=comm.device)
    runtime = _Runtime(
        program,
        comm,
        Calls.of(model, plan),
        random,
        stored,
        by_param,
        {},
        output_has_loss,
        owned,
        wholes,
        steps,
        seed_,
        planned_bytes(plan, comm),
        buffers_kept_for_backward(program),
    )
    parallel = ParallelModel(runtime, model, params)
    used = {name: owned[name].whole if name in owned else p for name, p in params.items()}
    origins = {name: s.origin(comm.rank) for name, s in stored.items() if s.copies}
    runtime.reducer = GradientReducer(comm, buckets, used, owned, wholes.changed, origins)
    if optimizer is not None:
        optimizers.put_on_shards(optimizer, swapped, comm.rank)
        if any(s.held.sizes or len(s.held.ranks) < comm.world_size for s in by_param.values()):
            optimizer.register_step_pre_hook(refuse_plain_scaler)
        if owned:
            optimizer.register_step_post_hook(lambda o, *_: wholes.start(optimizers.params_of(o)))
    runtime.hooks = HookWatch(parallel)
    if comm.device.type == "cpu":
        trim_heap(0)  # what setting up took
    return parallel, optimizer


def _check_autocast(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            "the model runs under autocast, which the program knows nothing of",
            expected="the casts within the model, where they are traced and planned",
            got=f"torch.autocast({device.type!r}) around the call of the model",
            hint=f"in the model's forward: with torch.autocast({device.type!r}, torch.bfloat16): ...",
        )


def _owners(program: Program, model: nn.Module) -> dict[Tensor, tuple[Layout, int]]:
    """Of owned parameters: who uses them, and the stage."""
    params = dict(model.named_parameters(remove_duplicate=False))
    return {
        params[i.args[0]]: (Layout(REPLICATE, program.participants(i.type)), stage_of(i))
        for i in program.params
        if owned_type(program, i) is not None
    }


def _groups(buckets: Sequence[Bucket], owned: Mapping[str, Owned]) -> tuple[list[list[Owned]], list[Parts]]:
    """What is gathered together, in the order of first use: the buckets of owned parameters, from the last
    that the backward pass completes. With each, its ranks by machine, if it is gathered by levels."""
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


def _of_params(stored: Mapping[str, Stored], model: nn.Module) -> dict[str, Stored]:
    return {name: stored[name] for name, _ in model.named_parameters()}


def _owner(root: nn.Module, name: str) -> nn.Module:
    """The submodule that holds ``name``, made if need be."""
    *path, _ = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    return root


def _transient_buffers(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
