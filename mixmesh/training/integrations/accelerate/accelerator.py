"""``Accelerator``: Accelerate's class, with every training step run by a plan on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader

from ....base.callers import warn
from ....base.launched import is_launched, rank_and_world_size
from ....base.patch import patched
from ....frontend.trace.own_generators import generators_in
from ....runtime.comm import default_device, initialise
from ....runtime.first_rank import everyones, from_first_rank
from ....runtime.launch_store import keep_starts_apart
from ....runtime.parallel import ParallelModel, full_optimizer_state_dict
from ....runtime.scaler import with_agreement
from ...preparation.loading import example_batch, same_random_numbers, take_random_numbers
from ...preparation.outside_loss import with_loss
from ..launched import (
    Epochs,
    check_not_spread,
    check_scaled,
    keep_metrics_apart,
    prepare_for,
)
from ..lending import Lender
from .model import as_one_device, lend_in_its_modes, without_loss_in_evaluation
from .one_process import as_first_process, keep_to_first_rank, look_like_one_process
from .refusals import (
    WITHOUT_PLAN,
    check_accelerator,
    check_arguments,
    check_planned,
    check_prepared,
    check_summed,
)

T = TypeVar("T")
TIMEOUT_S = 300.0


class _Optimizer(AcceleratedOptimizer):
    """The script's optimizer; its ``state_dict`` is the one of a single device."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parallel: ParallelModel, scaler: torch.amp.GradScaler | None
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self.parallel = parallel

    def state_dict(self) -> dict[str, Any]:
        """The state as on a single device. Collective."""
        return full_optimizer_state_dict(self.parallel, self.optimizer)


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` for a script that every rank of ``torchrun`` runs.

    To the script it is one process: ``num_processes`` is 1, the prepared loader gives whole batches on every
    rank, and training steps, evaluation and files are those of a single device. Only ``is_main_process``
    differs between ranks. ``prepare(model, optimizer, loader, ...)`` detects the devices and plans the step
    by a batch of the first loader. ``planning`` holds arguments of ``mixmesh.prepare`` for that (``{"loss":
    cross_entropy, "profile_s": 0}``), and may hold a ``batch``: the arguments with which the loop calls the
    model, if these are not the loader's. Without torchrun nothing changes.

    The constructor raises InputError for arguments that cannot be served exactly.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    scaler: torch.amp.GradScaler | None

    def __init__(self, *args: Any, planning: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.planning = dict(planning or {})
        self._lenders: dict[nn.Module, Lender] = {}
        # maps parameters from before prepare to the trained ones
        self._shown: dict[torch.Tensor, torch.Tensor] = {}
        self._is_alone = False  # whether this rank works while the others wait
        if is_launched():
            bound = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs)
            check_arguments(bound.arguments)
            keep_starts_apart()
            state = PartialState(bound.arguments.get("cpu", False), **_start_options(kwargs))
            look_like_one_process(state)
            initialise(rank_and_world_size()[1], default_device(), TIMEOUT_S)
            keep_to_first_rank(state)
            keep_metrics_apart()
        super().__init__(*args, **kwargs)
        if is_launched():
            check_accelerator(self)

    @property
    def process_index(self) -> int:
        """0, as in a single process, so that data and random numbers that follow from it agree on all
        ranks."""
        return 0 if is_launched() else super().process_index

    # ---- preparation

    def prepare(self, *args: Any, planning: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """The same objects, ready for this rank. Raises InputError unless a model comes with its optimizer
        and its training loader, which is the first of the loaders, or a ``batch`` in ``planning``.
        Collective."""
        planning = {**self.planning, **(planning or {})}
        models = [x for x in args if isinstance(x, nn.Module)]
        optimizers = [x for x in args if isinstance(x, torch.optim.Optimizer)]
        loaders = [x for x in args if isinstance(x, DataLoader)]
        if not is_launched():
            planning.pop("batch", None)
            return super().prepare(*(_with_loss(x, planning) for x in args), **kwargs)
        check_prepared(models, optimizers, loaders, planning.get("batch") is not None)
        take_random_numbers(generators_in(loaders))
        ready: dict[int, Any] = {}
        if optimizers:
            model, optimizer = self._parallel(models[0], optimizers[0], loaders, planning)
            ready = {id(models[0]): model, id(optimizers[0]): optimizer}
        return super().prepare(*(ready.get(id(x), x) for x in args), **kwargs)

    def _parallel(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loaders: list[DataLoader],
        planning: dict[str, Any],
    ) -> tuple[ParallelModel, _Optimizer]:
        check_not_spread(model)
        batch = planning.pop("batch", None)
        example = example_batch(loaders[0]) if batch is None else batch
        before = dict(model.named_parameters(remove_duplicate=False))
        model.train()  # training steps run in this mode
        model = super().prepare_model(model, evaluation_mode=True)
        self._models.remove(model)
        epochs = None if batch is not None else Epochs(loaders[0], "DataLoader(..., drop_last=True)")
        parallel, optimizer = prepare_for(
            model, optimizer, example, planning, epochs, self.gradient_accumulation_steps
        )
        check_scaled(parallel, self.scaler, 'Accelerator(mixed_precision="fp16")')
        self._lenders[parallel] = as_one_device(parallel, optimizer)
        shown = dict(parallel.named_parameters(remove_duplicate=False))
        self._shown.update({p: shown[name] for name, p in before.items()})
        if self.scaler is not None:
            self.scaler = with_agreement(self.scaler)
        prepared = _Optimizer(optimizer, parallel, self.scaler)
        parallel.__dict__["_is_accelerate_prepared"] = prepared.__dict__["_is_accelerate_prepared"] = True
        return parallel, prepared

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The optimizer that ``prepare`` has planned. Raises InputError for any other one."""
        if is_launched():
            check_planned(optimizer)
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The script's own module with whole weights, until the next training step. Collective, unless it is
        unwrapped already or all ranks have just waited for each other."""
        if model in self._lenders:
            return lend_in_its_modes(self._lenders[model])
        return super().unwrap_model(model, *args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        self._lenders.clear()
        self._shown.clear()
        return super().free_memory(*objects)

    # ---- training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if not self._lenders:
            if is_launched() and self.is_main_process:
                warn(WITHOUT_PLAN)
            return super().backward(loss, **kwargs)
        with same_random_numbers():  # rematerialised regions draw too
            return super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        if model not in self._lenders:
            with super().no_sync(model):
                yield
            return
        with self._lenders[model].parallel.no_sync():
            yield

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().clip_grad_norm_(self._to_clip(parameters, "clip_grad_norm_"), *args, **kwargs)

    def clip_grad_value_(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
        return super().clip_grad_value_(self._to_clip(parameters, "clip_grad_value_"), *args, **kwargs)

    def _to_clip(self, parameters: torch.Tensor | Iterable[torch.Tensor], method: str) -> list[torch.Tensor]:
        """Replaces the parameters that the script listed before ``prepare`` by the trained ones. Raises
        InputError if gradients of these are still to be summed."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = [self._shown.get(p, p) for p in parameters]
        if not self.sync_gradients:
            check_summed(trained, self._lenders, method)
        return trained

    def check_trigger(self) -> bool:
        mine = super().check_trigger()
        return any(everyones(mine)) if is_launched() else mine

    # ---- barriers

    def wait_for_everyone(self) -> None:
        """Waits for all ranks, and continues the first one's random numbers on all. From then until the next
        training step models are whole, so that the first rank can unwrap and save them on its own."""
        if not self._is_alone:
            for lender in self._lenders.values():
                lender.lend()
            super().wait_for_everyone()
            if is_launched():
                take_random_numbers()  # the first rank may have drawn some on its own

    def end_training(self) -> None:
        if not is_launched():
            return super().end_training()
        self.wait_for_everyone()
        for tracker in self.trackers:
            tracker.finish()
        return None

    # ---- files of a single device, written by the first rank

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if model in self._lenders:
            return self._lenders[model].lend().state_dict()
        return super().get_state_dict(model, unwrap)

    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if model not in self._lenders:
            return super().save_model(model, *args, **kwargs)
        self._lenders[model].lend()
        return self._by_first_rank(lambda: super(Accelerator, self).save_model(model, *args, **kwargs))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        if not is_launched():
            return super().save_state(*args, **kwargs)
        for lender in self._lenders.values():
            lender.lend()
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        stand_ins = [SimpleNamespace(state_dict=lambda state=state: state) for state in states]
        iteration = self.project_configuration.iteration
        try:
            with patched(self, "_optimizers", stand_ins):
                return self._by_first_rank(lambda: super(Accelerator, self).save_state(*args, **kwargs))
        finally:
            self.project_configuration.iteration = iteration + 1

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        if not is_launched():
            return super().load_state(*args, **kwargs)
        models = [self._lenders[m].lend() if m in self._lenders else m for m in self._models]
        # all ranks load the first rank's random numbers
        with patched(self, "_models", models), as_first_process(self.state):
            super().load_state(*args, **kwargs)
        for lender in self._lenders.values():
            lender.return_weights()
        return None

    def _by_first_rank(self, write: Callable[[], T]) -> T:
        def alone() -> T:
            self._is_alone = True
            try:
                return write()
            finally:
                self._is_alone = False

        value = from_first_rank(alone)
        take_random_numbers()  # hooks of the script may have drawn some, as where they make a module
        return value


def _start_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The script's own options for starting the process group."""
    handlers = kwargs.get("kwargs_handlers") or ()
    options = [h.to_kwargs() for h in handlers if isinstance(h, InitProcessGroupKwargs)]
    return options[0] if options else {}


def _with_loss(x: Any, planning: Mapping[str, Any]) -> Any:
    if not isinstance(x, nn.Module) or planning.get("loss") is None:
        return x
    return without_loss_in_evaluation(with_loss(x, planning["loss"], planning.get("outputs", ())))
