"""Makes shares follow the devices in a script's own loop (``mixmesh.prepare``).

The loader reports every batch, the model every call, the optimizer every step. Shares change between two
batches, once the loop has trained with everything that it was given; the next batch is cut by the new ones. A
loop in which that would not be exact keeps its shares, and the line of a decision says why.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, optim

from ...errors import InputError
from ...lang.plan_file import Plan
from ...runtime.optimizers import params_of
from ...runtime.parallel import ParallelModel
from ...runtime.shard_tensor import ShardTensor
from .balancer import RunBalancer
from .observe import Sensitivity
from .solve import Solver

TURN_OFF = "mixmesh.prepare(..., rebalance=False) keeps shares as planned"


class Loader(Protocol):
    """A loader from which a loop gets this rank's part of every batch (``preparation.own_loader``). The next
    ``num_old`` batches are still cut by the previous plan."""

    @property
    def num_ahead(self) -> int: ...
    @property
    def num_old(self) -> int: ...
    @property
    def is_single(self) -> bool: ...

    watch: Any

    def follow(self, plan: Plan) -> None:
        """Makes another plan cut the batches after the next ``num_ahead`` ones."""


class LoopBalancer:
    """The balancer of a loop over ``loader`` that trains ``model`` by ``optimizer``. The first rank uses
    ``solver``, which may be None on the others. Every rank makes a balancer before the loop."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: optim.Optimizer,
        loader: Loader,
        solver: Solver | None,
        say: Callable[[str], None] = lambda _: None,
        settings: Sensitivity | None = None,
    ) -> None:
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self.balancer = _BetweenBatches(
            loader, self._drop_gradients, solver, None, say, settings, why_not=self._why_not
        )
        self._has_begun = self._has_stepped = False
        self._started_s: float | None = None  # start of the current step
        self._own_s = self._step_s = 0.0  # seconds of the last step
        self._waited_s = self._loaded_s = self._asked_s = 0.0
        self._num_steps = self._num_calls = self._num_given = 0
        self._zeroed_at_batch = 0  # like the three below, its value at the time of that batch
        self._calls_at_batch = self._steps_at_batch = self._given_at_batch = 0
        self._has_trained_with_all = self._zeroes_before_steps = self._steps_with_each = True
        # gradients were dropped on behalf of the loop, which must drop them too
        self._owed_at: int | None = None
        run = model._runtime
        self._before_call = run.before_call
        run.before_call = self.on_call
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        loader.watch = self

    # --- told by the model, the optimizer and the loader ----------------------------------------------

    def on_call(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
        """Called before the model runs, with its arguments, which it returns."""
        self._num_calls += 1
        if self._started_s is None and self._model.training and torch.is_grad_enabled():
            self._started_s, self._loaded_s = time.perf_counter(), 0.0
            self._waited_s = self._model.comm.waits.time_s
        return (args, kwargs) if self._before_call is None else self._before_call(args, kwargs)

    def _before_step(self, *_: Any) -> None:
        if self._owed_at is not None and self._model._runtime.num_zeroed == self._owed_at:
            raise InputError(
                "gradients were dropped when shares changed, as zero_grad had done in every step before",
                expected="optimizer.zero_grad() between two batches in this step too",
                got="a step with the gradients of the one before",
                hint=TURN_OFF,
            )
        self._owed_at = None

    def _after_step(self, *_: Any) -> None:
        self._num_steps += 1
        self._has_stepped = True
        self._zeroes_before_steps &= self._model._runtime.num_zeroed > self._zeroed_at_batch
        if self._started_s is None:
            return
        self._step_s = time.perf_counter() - self._started_s - self._loaded_s
        self._own_s = self._step_s - (self._model.comm.waits.time_s - self._waited_s)
        self._started_s = None

    def on_batch(self) -> None:
        """Called when the loop is given a batch."""
        self._num_given += 1
        self._loaded_s += time.perf_counter() - self._asked_s

    def before_batch(self) -> None:
        """Called before the loop requests a batch. Collective if a step was made, or shares change."""
        self._look()
        if not self._has_begun:
            self._has_begun = True
            self.balancer.begin(self._model, self._optimizer, self._loader)
        if self.balancer.is_due(self._num_steps):
            self.balancer.apply()
        elif self._has_stepped:
            self.balancer.after_step(self._num_steps, self._step_s, self._own_s)
        self._has_stepped = False
        self._asked_s = time.perf_counter()

    # --- whether it is exact --------------------------------------------------------------------------

    def _look(self) -> None:
        """Notes how the loop handled the last batch."""
        num_given = self._num_given - self._given_at_batch
        if num_given:
            self._has_trained_with_all &= self._num_calls > self._calls_at_batch
            self._steps_with_each &= self._num_steps > self._steps_at_batch
        self._given_at_batch, self._calls_at_batch = self._num_given, self._num_calls
        self._steps_at_batch = self._num_steps
        self._zeroed_at_batch = self._model._runtime.num_zeroed

    def _why_not(self) -> str:
        """The reason why shares cannot change in this loop; empty if they can."""
        run = self._model._runtime
        if not self._loader.is_single:
            return "two iterations over the loader go on beside each other"
        if not self._has_trained_with_all:
            return "the loop asks for a batch before it has called the model with the last one"
        if self._started_s is not None:
            return "the loop trains on between a step and the next batch"
        if self._loader.num_ahead and not self._steps_with_each:
            return "workers load ahead, and a step of the optimizer takes several batches (num_workers=0)"
        if self._has_gradients() and not self._zeroes_before_steps:
            return "gradients are kept from step to step (optimizer.zero_grad() after the step)"
        if run.lent is not None or run.recorder is not None:
            return "the whole model is lent, or a step is recorded"
        return self._held_elsewhere()

    def _has_gradients(self) -> bool:
        run = self._model._runtime
        return any(p.grad is not None for p in (*run.node.shown, *run.node.inner))

    def _held_elsewhere(self) -> str:
        """The reason why the shares cannot change: the script holds another object that depends on them,
        besides the model and the optimizer. Empty if it holds none."""
        own, cut = set(map(id, self._own_tensors())), False
        params = set(map(id, params_of(self._optimizer)))
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, ParallelModel) and thing is not self._model:
                return "there is another parallel model, such as an average of this one"
            if issubclass(kind, ShardTensor):
                cut = cut or id(thing) not in own
            elif issubclass(kind, optim.Optimizer) and thing is not self._optimizer:
                if any(id(p) in params for p in params_of(thing)):
                    return "another optimizer has parameters of this model"
        return "the script holds other tensors that are cut by these shares" if cut else ""

    def _own_tensors(self) -> Iterator[Tensor]:
        run = self._model._runtime
        shown = (*self._model.parameters(), *self._model.buffers(), *run.node.inner)
        for p in shown:
            yield p
            if p.grad is not None:
                yield p.grad
        for state in self._optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor))

    def _drop_gradients(self) -> None:
        """Drops the gradients of the step before, as the loop itself does once it has its batch. Raises
        InputError if there was a backward pass since."""
        if not self._has_gradients():
            return
        if self._started_s is not None or not self._zeroes_before_steps:
            raise InputError(
                "shares were to change, and there are gradients that no step was made with",
                expected="a step of the optimizer with every batch, as before",
                got="a loop that has changed since shares were decided on",
                hint=TURN_OFF,
            )
        num_zeroed = self._model._runtime.num_zeroed
        self._model.zero_grad()
        self._model._runtime.num_zeroed = self._owed_at = self._zeroed_at_batch = num_zeroed


class _BetweenBatches(RunBalancer):
    """The balancer of a loop that may leave an epoch: shares change when the loader has no batches of the
    old ones left."""

    def __init__(
        self, loader: Loader, before_change: Callable[[], object], *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._loader, self._before_change = loader, before_change

    def is_due(self, num_steps: int) -> bool:
        return self._change is not None and not self._loader.num_old

    def apply(self) -> None:
        self._before_change()
        super().apply()
