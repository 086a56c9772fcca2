"""The model that ``parallelize`` returns: a model that is called like the original and returns the global
loss."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.timeline import bucket_name, parameters_name
from ..frontend.trace.autocast import no_autocast
from ..frontend.trace.compiled import never_compiled, warn_if_compiled
from ..lang.ir import Program
from .agreement import COMPARED_STEPS, facts_of_batch
from .batches import local_inputs
from .collectives import Handle
from .comm import Comm
from .copies import copies_of, copy_all
from .executor import local_piece
from .exporting import check_not_exported, exported
from .face import Face
from .gradients import Sums
from .guards import wrapped_twice
from .hooks import HookWatch
from .input_gradients import given_inputs, wanted_gradients
from .inspection import Inspector
from .modes import Modes, modes_of
from .outputs import Output
from .outside import Outside
from .passes import Forward, Runtime, accumulate, code_of, rooted, rooted_pieces, run_batch
from .pipeline import stage_inputs
from .recording import RecordedComm, Recorder, recorded
from .shard_numbers import Off
from .shard_tensor import plain
from .start import meets
from .states import check_model_state
from .unsummed import refuse_clipping
from .whole_model import pieces_of


class ParallelModel(Face):
    """This rank's part of a model: its parameters under the model's own names, and how to run them.

    From outside everything reads as on one device. Parameters that are cut are ``ShardTensor``s, which stand
    for the whole: ``torch.nn.utils.clip_grad_norm_``, penalties on parameters, ``numel()`` and
    ``torch.distributed.checkpoint`` give right results, and operations that cannot be right are refused.
    """

    _runtime: Runtime
    _in_order: tuple[nn.Module, ...]  # all modules within it

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        nn.Module.__init__(self)
        self.__dict__["_runtime"] = runtime
        self._wear(model, params, buffers)
        self.__dict__["_in_order"] = tuple(self.modules())
        self.register_load_state_dict_post_hook(lambda *_: runtime.wholes.changed())
        self._hooks_seen = HookWatch(self)

    @property
    def program(self) -> Program:
        return self._runtime.program

    @property
    def comm(self) -> Comm:
        return self._runtime.comm

    @property
    def modes(self) -> Modes:
        """Whether each of its modules trains, in their order."""
        return modes_of(self._in_order)

    @property
    def source(self) -> str:
        """The Python code that this rank runs."""
        return code_of(self._runtime, self._runtime.forms.planned, training=self.training).source

    @never_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Tensor | Output:
        """Runs the model on whole batches or on this rank's parts. Returns, on every rank, the loss of the
        whole batch or the model's own return value with it (see ``outputs``); for a model without a loss its
        outputs (see ``outside``). While the whole model is lent, runs that one instead."""
        if (lent := self._runtime.lent) is not None:
            return lent(*args, **kwargs)
        random = self._runtime.random
        if random.step == random.first_step and not self.comm.rank:
            warn_if_compiled()
        result = self._run(args, kwargs)
        if result.outside is not None:
            return self._whole_outputs(result, result.outside)
        assert result.total is not None  # the model has a loss
        loss = self._shown(rooted(self._runtime, result.total.wait(), result), result)
        return loss if result.returns is None else result.returns(loss, result.shown, self.comm)

    def forward_local(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Handle | None]:
        """This rank's addend of the loss, to call ``backward`` on, and a handle whose ``wait()`` gives the
        global loss (None for a model that computes none). Waits for other ranks only when they agree on the
        batch, and in collectives of the program."""
        result = self._run(args, kwargs)
        return self._shown(rooted(self._runtime, result.value.clone(), result), result), result.total

    def forward_addend(self, *args: Any, **kwargs: Any) -> Tensor:
        """This rank's addend of the loss, to call ``backward`` on, for callers who sum it themselves
        (``sum_of_ranks``)."""
        result = self._run(args, kwargs, sums=False)
        return self._shown(rooted(self._runtime, result.value.clone(), result), result)

    def _run(self, args, kwargs, *, sums: bool = True) -> Forward:
        check_not_exported(args, kwargs)
        if self._runtime.followed is not None:
            self._runtime.followed.pass_on()
        with self.comm.call("train forward" if self.training else "evaluation forward"):
            self._runtime.check_values()
            self._runtime.guards.check(self)
            self._runtime.left.hide()  # also those that the script has set since the last call
            if self._runtime.before_call is not None:
                args, kwargs = self._runtime.before_call(args, kwargs)
            self._hooks_seen.check(self)
            with no_autocast():  # the program contains the casts
                return self._pass(args, kwargs, sums=sums)

    def _pass(self, args, kwargs, *, sums: bool) -> Forward:
        run = self._runtime
        if self.training:
            run.heap.before_step()
        tensors = run.calls.tensors(args, kwargs, evaluates=not self.training)
        # errors that this rank can detect alone are reported before it waits for others
        wanted = wanted_gradients(run.program, tensors)
        form = run.forms.form(tensors, args, kwargs, modes=self.modes, wanted=wanted)
        steps = form.steps
        if steps is not None and steps.is_pipeline:
            inputs = stage_inputs(form.program, steps.samples, tensors, run.comm, len(steps.sizes))
        else:
            inputs = local_inputs(form.program, tensors, run.comm.rank, run.comm.device)
        inputs, given = given_inputs(form.program, tensors, inputs, run.comm)
        self._agree(form.program, tensors)
        if self.training or not form.is_traced:
            self._check_planned(args, kwargs)
        run.forms.check_questions(form, wanted)
        buffers = {name: plain(b) for name, b in run.guards.tables.buffers().items()}
        read = buffers
        if torch.is_grad_enabled():
            # the forward pass ends by putting new values in place, while autograd may have saved the old ones
            read = buffers | copies_of({name: buffers[name] for name in form.kept_buffers})
        run.random.step += 1
        if self.training and torch.is_grad_enabled():
            run.node.earlier.before_forward(is_unsummed=run.reducer.is_unsummed)
        run.wholes.start()
        training = self.training or form.is_traced
        if steps is None:
            result, updated = run_batch(run, form, read, inputs, takes_given=bool(given), training=training)
        else:
            result, updated = accumulate(run, form, read, inputs, training=training)
        run.wholes.finish()
        with torch.no_grad():
            pieces = [local_piece(x, run.stored[name].held, run.comm.rank) for name, x in updated.items()]
            copy_all([buffers[name] for name in updated], pieces)
        run.summed = form.program
        total = self.sum_of_ranks(result.value) if sums and form.outside is None else None
        return replace(result, returns=form.returns, total=total, outside=form.outside, given=given)

    def _agree(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        """Compares the batch (in the first steps) and parameters (now and then) between ranks, which have
        already agreed on the call. Collective."""
        run = self._runtime
        if run.random.step - run.random.first_step < COMPARED_STEPS:
            run.comm.compare(lambda: facts_of_batch(program, tensors))
        if self.training:
            run.drift.before_call()

    def sum_of_ranks(self, addend: Tensor) -> Handle:
        """A handle on the sum over all ranks that computed the last batch of their addends: those of the
        loss, or of tensors of one shape and dtype. Collective."""
        form = self._runtime.summed
        assert form is not None  # a batch has run
        return self._runtime.loss_sum.start(self.comm, addend, form)

    def check_replicas(self) -> None:
        """Raises InputError on all ranks if a parameter that several of them hold whole differs between them;
        for use before a checkpoint, for instance. Collective if there are such parameters."""
        self._runtime.drift.check()

    def compare(self, batch: Mapping[str, Any] | tuple | list) -> None:
        """Raises InputError on all ranks if they were not given the same whole batch. Collective."""
        run = self._runtime
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})
        tensors = run.calls.tensors(args, kwargs)
        with run.comm.call("the first batches"):
            run.comm.compare(lambda: facts_of_batch(run.program, tensors))

    def check_planned(self, batch: Mapping[str, Any] | tuple) -> None:
        """Compares the model with its plan now, using a batch, instead of at the first call. Collective.
        Raises PlanError if the model was changed since it was planned."""
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})
        self._check_planned(args, kwargs)

    def _check_planned(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        run = self._runtime
        if run.unchecked is not None:
            run.unchecked.check(args, kwargs, run.comm)
            run.unchecked = None

    def _shown(self, loss: Tensor, done: Forward) -> Tensor:
        is_rooted = done.is_alone or not loss.requires_grad
        return loss if is_rooted else self._runtime.node.root([loss], done.given, is_loss=True)[0]

    def _whole_outputs(self, done: Forward, outside: Outside) -> Any:
        """The outputs of a model without a loss, whole on every rank, in the form in which the model returns
        them."""
        run = self._runtime
        pieces = rooted_pieces(run, outside.pieces(done.shown, run.comm), done)
        if torch.is_grad_enabled():
            pieces = run.node.root(pieces, done.given)
        with run.comm.call("gather of outputs"):
            return outside.whole(pieces, run.comm, is_compared=run.is_in_first_steps)

    def no_sync(self):
        """A context for gradient accumulation: backward passes within it leave the gradients of replicated
        parameters unsummed; they are summed with those of the next pass outside. Until then ``p.grad`` does
        not show them, and clipping them is refused; ``zero_grad`` of the model or of the optimizer drops
        them."""
        refuse_clipping(self, lambda model: model._runtime.reducer.is_unsummed)
        return self._runtime.reducer.summing(Sums.NONE)

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """A context in which everything that this rank computes and communicates is measured."""
        run = self._runtime
        before = run.comm, run.compiled, run.recorder
        run.comm, run.compiled, run.recorder = RecordedComm.of(run.comm, recorder), {}, recorder
        steps = run.forms.planned.steps
        for size in set(steps.sizes) if steps else (None,):
            # so that it does not happen in the first measured step
            code_of(run, run.forms.planned, size, training=self.training)

        # maps to the first of several copies
        result_of = {p.args[0]: p.result for p in reversed(self.program.params)}

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

    @contextmanager
    def inspected(self, inspector: Inspector) -> Iterator[None]:
        """A context in which ``inspector`` sees all values and gradients of this rank."""
        run = self._runtime
        before = run.compiled, run.inspector
        run.compiled, run.inspector = {}, inspector
        try:
            yield
        finally:
            run.compiled, run.inspector = before

    @meets("clip_grad_norm_")
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Does the same as ``torch.nn.utils.clip_grad_norm_`` for all parameters; returns the norm before.
        Collective."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def _is_whole_everywhere(self) -> bool:
        """Whether every rank holds all of the model, and needs no other rank for it."""
        return all(s.is_everywhere(self.comm.world_size) for s in self._runtime.stored.values())

    @meets("full_state_dict", unless=lambda model: model._is_whole_everywhere())
    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """The original model's ``state_dict``, on the CPU. Collective. With ``rank0_only`` the others get
        an empty one."""
        self._runtime.check_values()
        out: dict[str, Tensor] = {}
        wholes: dict[int, Tensor] = {}
        for name, mine in pieces_of(self).items():
            if id(mine) not in wholes:
                whole = self._runtime.stored[name].whole(plain(mine), self.comm)
                keep = self.comm.rank == 0 or not rank0_only
                wholes[id(mine)] = whole.cpu().clone() if keep else whole.new_empty(0)
            out[name] = wholes[id(mine)]
        return {} if rank0_only and self.comm.rank else out

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a ``state_dict`` of the original model; every rank passes it. Raises PlanError, before
        anything is changed."""
        own, stored = pieces_of(self), self._runtime.stored
        check_model_state(state, {name: stored[name] for name in own})
        for name, mine in own.items():
            plain(mine).copy_(stored[name].piece(state[name], self.comm.rank, self.comm.device))
        self._runtime.values_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, also those that ``no_sync`` has left unsummed."""
        with Off():
            nn.Module.zero_grad(self, set_to_none)
        self._runtime.drop_gradients()

    def train(self, mode: bool = True) -> ParallelModel:
        """Sets the training mode, also on the whole model while it is lent, and on the script's own."""
        super().train(mode)
        if self._runtime.followed is not None:
            self._runtime.followed.show()
        if (lent := self._runtime.lent) is not None:
            lent.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModel:
        """Refuses ``to``, ``half``, ``cuda`` and the like if they would change anything."""
        self._runtime.guards.check_conversion(fn)
        return self

    def _replicate_for_data_parallel(self):
        raise wrapped_twice("torch.nn.DataParallel")

    @property
    def _ddp_params_and_buffers_to_ignore(self):
        asker = sys._getframe(1).f_globals.get("__name__", "")  # TorchScript asks for every attribute
        if asker.startswith(("torch.jit", "torch._jit")):
            raise exported("TorchScript (torch.jit.trace, torch.jit.script, add_graph of TensorBoard)")
        raise wrapped_twice("torch.nn.parallel.DistributedDataParallel")
