"""``Accelerator``: that of Accelerate, with every training step run by a plan on all ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader

from ....runtime.comm import default_device, initialise
from ....runtime.first_rank import everyones, from_first_rank
from ....runtime.parallel import ParallelModel, full_optimizer_state_dict
from ...preparation.loading import example_batch, same_random_numbers, take_random_numbers
from ...preparation.outside_loss import with_loss
from ...preparation.script import prepare
from ..launched import is_launched, keep_metrics_apart
from ..lending import Lender
from .model import as_one_device, lend_in_its_modes, without_loss_in_evaluation
from .one_process import as_first_process, keep_to_first_rank, look_like_one_process
from .refusals import check_accelerator, check_arguments, check_model, check_prepared

TIMEOUT_S = 300.0


class _Optimizer(AcceleratedOptimizer):
    """The script's optimizer, whose state is that of a single device."""

    def __init__(self, optimizer: torch.optim.Optimizer, parallel: ParallelModel) -> None:
        super().__init__(optimizer, device_placement=False)
        self.parallel = parallel

    def state_dict(self) -> dict[str, Any]:
        """As on a single device. Collective."""
        return full_optimizer_state_dict(self.parallel, self.optimizer)


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` for a script that every rank of ``torchrun`` runs.

    To the script it is one process: ``num_processes`` is 1, a batch of the prepared loader is whole on every
    rank, and training steps, evaluation and files are those of a single device. Only ``is_main_process``
    differs between ranks. ``prepare(model, optimizer, loader, ...)`` detects the devices and plans the step
    by a batch of the first loader. ``planning`` holds arguments for that, as ``mixmesh.prepare`` takes them
    (``{"loss": cross_entropy, "profile_s": 0}``), and ``batch``, what the loop calls the model with, where
    that is not the loader's. Without torchrun nothing is changed.

    Raises InputError when it is made, for arguments that cannot be kept exactly.
    """

    def __init__(self, *args: Any, planning: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.planning = dict(planning or {})
        self._lenders: dict[nn.Module, Lender] = {}
        self._shown: dict[nn.Parameter, nn.Parameter] = {}  # by the parameter from before prepare
        self._is_alone = False  # other ranks wait for what this one does
        if is_launched():
            bound = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs)
            check_arguments(bound.arguments)
            state = PartialState(bound.arguments.get("cpu", False), **_start_options(kwargs))
            look_like_one_process(state)
            initialise(int(os.environ["WORLD_SIZE"]), default_device(), TIMEOUT_S)
            keep_to_first_rank(state)
            keep_metrics_apart()
        super().__init__(*args, **kwargs)
        if is_launched():
            check_accelerator(self)

    @property
    def process_index(self) -> int:
        """0, as in a single process: data and random numbers that depend on it are alike on all ranks."""
        return 0 if is_launched() else super().process_index

    # ---- what is prepared

    def prepare(self, *args: Any, planning: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """The same objects, ready for this rank. Raises InputError unless a model comes with its optimizer
        and its training loader, the first of the loaders. Collective."""
        planning = {**self.planning, **(planning or {})}
        models = [x for x in args if isinstance(x, nn.Module)]
        optimizers = [x for x in args if isinstance(x, torch.optim.Optimizer)]
        loaders = [x for x in args if isinstance(x, DataLoader)]
        if not is_launched():
            planning.pop("batch", None)
            return super().prepare(*(_with_loss(x, planning) for x in args), **kwargs)
        check_prepared(models, optimizers, loaders)
        take_random_numbers()
        ready: dict[int, Any] = {}
        if optimizers:
            model, optimizer = self._parallel(models[0], optimizers[0], loaders[0], planning)
            ready = {id(models[0]): model, id(optimizers[0]): optimizer}
        return super().prepare(*(ready.get(id(x), x) for x in args), **kwargs)

    def _parallel(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader,
        planning: dict[str, Any],
    ) -> tuple[ParallelModel, _Optimizer]:
        check_model(model)
        batch = planning.pop("batch", None)
        example = example_batch(loader) if batch is None else batch
        before = dict(model.named_parameters(remove_duplicate=False))
        model.train()  # as every training step has it
        model = super().prepare_model(model, evaluation_mode=True)
        self._models.remove(model)
        parallel, optimizer, _ = prepare(model, optimizer, [example], **planning)
        self._lenders[parallel] = as_one_device(parallel, optimizer)
        shown = dict(parallel.named_parameters(remove_duplicate=False))
        self._shown.update({p: shown[name] for name, p in before.items()})
        prepared = _Optimizer(optimizer, parallel)
        parallel._is_accelerate_prepared = prepared._is_accelerate_prepared = True
        return parallel, prepared

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
            return super().backward(loss, **kwargs)
        with same_random_numbers():  # regions that are computed again draw too
            return super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        if model not in self._lenders:
            with super().no_sync(model):
                yield
            return
        with model.no_sync():
            yield

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().clip_grad_norm_(self._now(parameters), *args, **kwargs)

    def clip_grad_value_(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
        return super().clip_grad_value_(self._now(parameters), *args, **kwargs)

    def _now(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that are trained, also where they were listed before ``prepare``."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        return [self._shown.get(p, p) for p in parameters]

    def check_trigger(self) -> bool:
        mine = super().check_trigger()
        return any(everyones(mine)) if is_launched() else mine

    # ---- meeting

    def wait_for_everyone(self) -> None:
        """Waits for all ranks. Models are whole from then on until the next training step, so that the first
        rank can unwrap and save them by itself."""
        if not self._is_alone:
            for lender in self._lenders.values():
                lender.lend()
            super().wait_for_everyone()

    def end_training(self) -> None:
        if not is_launched():
            return super().end_training()
        self.wait_for_everyone()  # and goes on without the trackers
        for tracker in self.trackers:
            tracker.finish()
        return None

    # ---- files, as those of a single device, by the first rank

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
        optimizers, iteration = self._optimizers, self.project_configuration.iteration
        self._optimizers = [SimpleNamespace(state_dict=lambda state=state: state) for state in states]
        try:
            return self._by_first_rank(lambda: super(Accelerator, self).save_state(*args, **kwargs))
        finally:
            self._optimizers, self.project_configuration.iteration = optimizers, iteration + 1

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        if not is_launched():
            return super().load_state(*args, **kwargs)
        models = self._models
        self._models = [self._lenders[m].lend() if m in self._lenders else m for m in models]
        try:
            with as_first_process(self.state):  # random numbers are alike on all ranks
                super().load_state(*args, **kwargs)
        finally:
            self._models = models
        for lender in self._lenders.values():
            lender.give_weights()
        return None

    def _by_first_rank(self, write: Any) -> Any:
        def alone() -> Any:
            self._is_alone = True
            try:
                return write()
            finally:
                self._is_alone = False

        return from_first_rank(alone)


def _start_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The script's own arguments for how processes find each other."""
    handlers = kwargs.get("kwargs_handlers") or ()
    options = [h.to_kwargs() for h in handlers if isinstance(h, InitProcessGroupKwargs)]
    return options[0] if options else {}


def _with_loss(x: Any, planning: Mapping[str, Any]) -> Any:
    if not isinstance(x, nn.Module) or planning.get("loss") is None:
        return x
    return without_loss_in_evaluation(with_loss(x, planning["loss"], planning.get("outputs", ())))
