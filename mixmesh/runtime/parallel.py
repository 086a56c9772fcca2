"""``parallelize``: an ordinary model and optimizer, from now on one rank's part of a program.

The returned model is called like the original and returns the global loss, so a single-device training
loop runs unchanged under ``torchrun``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MixmeshError, PlanError
from ..ir import Program
from ..timeline import bucket_name
from ..trace.dtypes import TORCH_DTYPE
from . import optimizers
from .batches import local_inputs, named_tensors
from .collectives import Handle, all_reduce, then
from .comm import Comm
from .executor import RankProgram, compile_program
from .gradients import GradientReducer, assign_buckets
from .random import RandomPolicy
from .recording import RecordedComm, Recorder, recorded
from .shards import Stored, agree, stored_tensors


@dataclass(frozen=True)
class Output:
    """What a model that returned an object with ``.loss`` returns now."""

    loss: Tensor

    def __getitem__(self, key: str | int) -> Tensor:
        if key in ("loss", 0):
            return self.loss
        raise KeyError(key)


@dataclass
class _Runtime:
    """Everything of a ParallelModel that is not a module: kept in one attribute, out of the way of the
    model's own names."""

    program: Program
    comm: Comm
    random: RandomPolicy
    stored: dict[str, Stored]  # by every name
    by_param: dict[Tensor, Stored]
    compiled: dict[bool, RankProgram]  # by training
    output_has_loss: bool
    reducer: GradientReducer | None = None
    recorder: Recorder | None = None


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
        local, tokens = self._run(args, kwargs)
        value = self._total(local).wait()
        loss = self._rooted(value, local, tokens)
        return Output(loss) if self._runtime.output_has_loss else loss

    def forward_local(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Handle]:
        """This rank's addend of the loss, to call ``backward`` on, and a handle whose ``wait()`` gives
        the global loss. Does not wait for other ranks."""
        local, tokens = self._run(args, kwargs)
        handle = self._total(local)
        value = self._zero() if local is None else local.detach().clone()
        return self._rooted(value, local, tokens), handle

    def _run(self, args, kwargs) -> tuple[Tensor | None, list[Tensor]]:
        run = self._runtime
        tensors = named_tensors(run.program, args, kwargs)
        inputs = local_inputs(run.program, tensors, run.comm.rank, run.comm.device)
        params = dict(self.named_parameters(remove_duplicate=False))
        buffers = dict(self.named_buffers(remove_duplicate=False))
        run.random.step += 1
        local, updated, tokens = self._compiled().run(params, buffers, inputs)
        with torch.no_grad():
            for name, value in updated.items():
                buffers[name].copy_(value)
        return local, tokens

    def _compiled(self) -> RankProgram:
        run = self._runtime
        if self.training not in run.compiled:
            updates = [i for i in run.program.instructions if i.op == "update"]
            if not self.training and updates:
                raise MixmeshError(
                    "the program was planned for training and updates buffers: it cannot evaluate",
                    got=f"an update of {updates[0].args[0]}, and model.training = False",
                    hint="load model.full_state_dict() into the original model and evaluate that",
                )
            run.compiled[self.training] = compile_program(
                run.program,
                run.comm.rank,
                run.comm,
                run.comm.device,
                run.random,
                training=self.training,
                sink=run.reducer.sink,
                recorder=run.recorder,
            )
        return run.compiled[self.training]

    def _zero(self) -> Tensor:
        dtype = TORCH_DTYPE[self.program.types[self.program.loss].value.dtype]
        return torch.zeros((), dtype=dtype, device=self.comm.device)

    def _total(self, local: Tensor | None) -> Handle:
        value = self._zero() if local is None else local.detach()
        wide = value if value.dtype == torch.float64 else value.float()
        channel = self.comm.channel(self.comm.everyone, "all_reduce of the loss")
        handle = all_reduce(channel, wide, async_op=True)
        return then(lambda total: total.to(value.dtype), handle)

    def _rooted(self, value: Tensor, local: Tensor | None, tokens: list[Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            return value
        anchor = torch.empty(0, device=self.comm.device, requires_grad=True)
        return _Loss.apply(self._runtime.reducer, value, anchor, local, *tokens)

    def no_sync(self):
        """Within it, backward passes leave the gradients of replicated parameters unsummed, to be summed
        with those of the next pass outside: for gradient accumulation."""
        return self._runtime.reducer.paused()

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """Within it, all that this rank computes and communicates is measured."""
        run = self._runtime
        before = run.comm, run.compiled, run.recorder
        run.comm, run.compiled, run.recorder = RecordedComm.of(run.comm, recorder), {}, recorder
        self._compiled()  # not in the first step that is measured

        result_of = {p.args[0]: p.result for p in self.program.params}

        def channel_of(channel, bucket, size_bytes):
            name = bucket_name([result_of[param] for param in bucket.names])
            return recorded(channel, recorder, name, "all_reduce", size_bytes)

        try:
            with run.reducer.through(channel_of):
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
            if p.grad is not None and (stored.held.sizes or comm.rank == stored.held.ranks[0]):
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


class _Loss(torch.autograd.Function):
    """Forward: the value given. Backward: a gradient for this rank's addend, which for a sum is its own."""

    @staticmethod
    def forward(ctx, reducer, value, anchor, local, *tokens):
        ctx.reducer, ctx.has_local, ctx.num_tokens = reducer, local is not None, len(tokens)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.reducer.begin()
        return None, None, None, gradient if ctx.has_local else None, *(None,) * ctx.num_tokens


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Any,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    seed: int = 0,
    random_exact: bool = False,
) -> tuple[ParallelModel, torch.optim.Optimizer | None]:
    """This process's part of ``model`` under a plan (or a Program). Collective.

    The optimizer object stays the same, its parameters become the shards. All ranks start from rank 0's
    values. ``seed`` decides the random numbers of dropout; with ``random_exact`` they are those of the
    single device. Raises PlanError if the model or the number of processes is not the plan's, InputError
    for an optimizer that cannot work on shards.
    """
    program = plan if isinstance(plan, Program) else plan.program
    output_has_loss = False if isinstance(plan, Program) else getattr(plan, "output_has_loss", False)
    stored = stored_tensors(program, model)
    if optimizer is not None:
        optimizers.check_optimizer(optimizer, _of_params(stored, model))
    comm = Comm.create(program, device=device, timeout_s=timeout_s)
    agree([*model.parameters(), *model.buffers()], comm)
    swapped: dict[Tensor, tuple[Tensor, Stored]] = {}
    params: dict[str, nn.Parameter] = {}
    for name, whole in model.named_parameters(remove_duplicate=False):
        if whole not in swapped:
            piece = stored[name].piece(whole, comm.rank, comm.device)
            swapped[whole] = (nn.Parameter(piece, requires_grad=whole.requires_grad), stored[name])
        params[name] = swapped[whole][0]
    by_param = dict(swapped.values())
    random = RandomPolicy(seed, exact=random_exact)
    runtime = _Runtime(program, comm, random, stored, by_param, {}, output_has_loss)
    parallel = ParallelModel(runtime, model, params)
    runtime.reducer = GradientReducer(comm, assign_buckets(program), params)
    if optimizer is not None:
        optimizers.swap_params(optimizer, swapped, comm.rank)
    return parallel, optimizer


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
