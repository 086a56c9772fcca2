"""``Strategy``: runs every training step of Lightning's Trainer by a plan on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from ....base.launched import is_launched, rank_and_world_size
from ....errors import InputError
from ....frontend.trace.outputs import IfGiven
from ....runtime.comm import default_device, initialise
from ....runtime.first_rank import from_first_rank, wait_for_all
from ....runtime.modes import modes_by_name, set_modes_by_name
from ....runtime.parallel import ParallelModel, full_optimizer_state_dict
from ....runtime.scaler import with_agreement
from ...preparation.loading import same_random_numbers, take_random_numbers
from ..launched import (
    Epochs,
    check_alike,
    check_scaled,
    keep_metrics_apart,
    learning_rates,
    prepare_for,
)
from ..lending import Lender
from ..weights import fill
from .manual import Manual
from .parts import keeping_modes, twin_of, wear
from .refusals import check_device, check_precision, check_training, naming_lines, refused
from .step import LOGGED, RETURNED, Form, TrainingStep, size_of

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Planned:
    """The planned ``step``: its ``parallel`` model, the lender of the module, the mode of each submodule when
    the step was planned, and a copy that keeps the module's own tensors and submodules."""

    step: TrainingStep
    parallel: ParallelModel
    lender: Lender
    modes: dict[str, bool]
    own: nn.Module

    def start(self) -> None:
        """Takes the module back before a step, whose modes are now those of the parallel model, with weights
        that a callback changed in it. Raises InputError if ranks changed them differently. Collective."""
        self.lender.take_back()
        self.hide()
        set_modes_by_name(self._shown, modes_by_name(self.step.module))

    @property
    def _shown(self) -> nn.Module:
        return self.parallel.get_submodule("module")

    def show(self) -> None:
        """Shows the trained parameters, and their gradients, in the module, for hooks between two steps."""
        with keeping_modes(self.step.module):
            wear(self.step.module, self._shown)

    def hide(self) -> None:
        """Puts the module's own tensors and submodules back, to be traced, lent and filled."""
        with keeping_modes(self.step.module):
            wear(self.step.module, self.own)

    def lend(self) -> None:
        """Gives the module whole weights until the next step. Collective."""
        self.hide()
        self.lender.lend()

    def check_form(self, form: Form, modes: Mapping[str, bool]) -> None:
        """Raises InputError unless a batch has the planned form and the modules their planned modes."""
        if modes != self.modes:
            changed = [name or "the module" for name, mode in modes.items() if mode != self.modes.get(name)]
            raise InputError(
                "modules train that evaluated when the step was planned, or the other way round",
                expected="the modes of the first step",
                got=", ".join(changed[:3]),
                hint="module.eval() of a frozen part in on_fit_start, or a new Trainer from there on",
            )
        if form != self.step.form:
            raise InputError(
                "the batch has another form than the one that was planned",
                expected=f"{self.step.form.spec}, {self.step.form.constants}",
                got=f"{form.spec}, {form.constants}",
                hint=(
                    "a collate_fn that returns the same names, numbers that change as tensors, and no "
                    "strings that change"
                ),
            )


class Strategy(SingleDeviceStrategy):
    """Trains with all processes of ``torchrun`` as with a single device.

    Every rank runs the script and reads the same, whole batches. When the first batch is there, the devices
    are detected and ``training_step`` is planned with what it logs; ``planning`` holds arguments of
    ``mixmesh.prepare`` for that (``{"profile_s": 0}``). During training every rank holds only its part of the
    module's weights, and hooks and callbacks that read them are refused; validation, checkpoints and the end
    of ``fit`` see them whole in the module, on every rank. Without torchrun it is the strategy of a single
    device.

    ``fit`` raises InputError at its start for settings that cannot be followed exactly.
    """

    strategy_name = "mixmesh"

    def __init__(self, *, planning: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.planning = dict(planning or {})
        self._planned: _Planned | None = None  # set from the first batch on
        self._manual: Manual | None = None  # set from the start of fit on, in manual optimization
        self._has_trained = False

    @property
    def parallel(self) -> ParallelModel | None:
        """The parallel model; None before the first batch."""
        return None if self._planned is None else self._planned.parallel

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None  # connected before any hook runs
        return self.lightning_module

    # ---- one process

    @property
    def root_device(self) -> torch.device:
        is_cpu = self.accelerator is None or isinstance(self.accelerator, pl.accelerators.CPUAccelerator)
        return torch.device("cpu") if is_cpu else default_device()

    @property
    def is_global_zero(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    def setup_environment(self) -> None:
        if is_launched():
            check_device(self.root_device, default_device())
            initialise(rank_and_world_size()[1], default_device(), TIMEOUT_S)
            keep_metrics_apart()
        super().setup_environment()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        wait_for_all("a barrier of Lightning")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return from_first_rank(lambda: obj) if dist.is_initialized() else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The first rank's decision: devices may round differently, but all ranks must decide alike."""
        return self.broadcast(decision)

    # ---- training

    def setup(self, trainer: pl.Trainer) -> None:
        fits = is_launched() and trainer.state.fn == TrainerFn.FITTING
        if fits and (self._planned is not None or self._manual is not None):
            raise refused("a second fit", "one fit of a Trainer", "make a new Trainer, with a new Strategy()")
        super().setup(trainer)
        if fits:
            check_training(trainer, self._module, self.optimizers)
            check_precision(self.precision_plugin)
            plugin = self.precision_plugin
            if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
                plugin.scaler = with_agreement(plugin.scaler)
            take_random_numbers()
            if not self._module.automatic_optimization:
                scaler = getattr(plugin, "scaler", None)
                self._manual = Manual(self._module, self.optimizers, self.planning, scaler)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Plans by the first batch, before the first step of the optimizer, which calls ``training_step``."""
        if not is_launched() or self._planned is not None or self._manual is not None:
            return
        module, (optimizer,) = self._module, self.optimizers
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        step, modes = TrainingStep(module, batch, takes_index), modes_by_name(module)
        with naming_lines(module.training_step), self.precision_plugin.train_step_context():
            options = {"outputs": (IfGiven(LOGGED), IfGiven(RETURNED)), **self.planning}
            trainer = module.trainer
            parallel, _ = prepare_for(
                step, optimizer, step.tensors, options, _epochs_of(trainer), _num_passes(trainer)
            )
        step.log.keep(*from_first_rank(step.log.traced))  # only one rank traces
        # before validation Lightning calls zero_grad of the module
        vars(module)["zero_grad"] = parallel.zero_grad
        self._planned = _Planned(step, parallel, Lender(parallel), modes, twin_of(module))
        check_scaled(parallel, getattr(self.precision_plugin, "scaler", None), 'precision="16-mixed"')

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with naming_lines(self._module.training_step):
            if self._manual is not None:
                with self._manual.step((args, kwargs)):
                    return super().training_step(*args, **kwargs)
            if self._planned is None:
                return super().training_step(*args, **kwargs)
            return self._run(self._planned, args[0])

    def _run(self, planned: _Planned, batch: Any) -> Any:
        """The result of ``training_step`` for a batch, by the plan. Collective."""
        logged, returned = planned.step.log.traced()
        planned.start()
        form, tensors = Form.of(batch)
        check_alike(tensors, learning_rates(self.optimizers[0]))
        planned.check_form(form, modes_by_name(self._module))
        with (
            self.precision_plugin.train_step_context(),
            same_random_numbers(),  # ranks draw different numbers here, but the same ones for the next batch
            self._unless_stepping(planned.parallel),
        ):
            out = planned.parallel(**tensors)
        if returned or any(each.key is not None for each in logged):
            out = out.everywhere()
        for each in logged:
            each.log(self._module, out, size_of(batch))
        planned.show()
        return planned.step.log.result(out)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if self._manual is not None:
            self._manual.after_step(optimizer)
        return result

    def _unless_stepping(self, parallel: ParallelModel) -> AbstractContextManager[None]:
        """Returns ``no_sync`` of the model if another batch of the same optimizer step follows."""
        accumulates = self._module.trainer.fit_loop._should_accumulate()
        return parallel.no_sync() if accumulates else nullcontext()

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._planned is None:
            return super().backward(closure_loss, *args, **kwargs)
        # rematerialised regions draw random numbers
        with same_random_numbers(), self._unless_stepping(self._planned.parallel):
            return super().backward(closure_loss, *args, **kwargs)

    # ---- the whole module

    def _lend(self) -> None:
        if self._has_trained:
            return
        if self._planned is not None:
            self._planned.lend()
        if self._manual is not None:
            self._manual.lend()

    def on_validation_start(self) -> None:
        self._lend()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._lend()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        if self._manual is not None:
            return self._manual.optimizer_state(getattr(optimizer, "_optimizer", optimizer))
        if self._planned is None:
            return super().optimizer_state(optimizer)
        return full_optimizer_state_dict(self._planned.parallel, getattr(optimizer, "_optimizer", optimizer))

    def on_train_end(self) -> None:
        planned = self._planned
        if planned is not None and not self._has_trained:
            planned.lender.take_back()
            planned.hide()
            fill(planned.step, planned.parallel)
            del vars(self._module)["zero_grad"]
            self._has_trained = True
        if self._manual is not None and not self._has_trained:
            self._manual.finish()
            self._has_trained = True

    def teardown(self) -> None:
        if self._planned is None and self._manual is None:
            return super().teardown()
        if self._has_trained:
            self._module.cpu()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        return None


def _num_passes(trainer: pl.Trainer) -> int:
    """The most batches in one step of the optimizer."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # the connector sets it, past the stubs
    schedulers = (c for c in callbacks if isinstance(c, GradientAccumulationScheduler))
    numbers = (number for each in schedulers for number in each.scheduling.values())
    return max(trainer.accumulate_grad_batches, *numbers, 1)


def _epochs_of(trainer: pl.Trainer) -> Epochs:
    """The epochs that a ``trainer`` is about to train."""
    num_batches = trainer.num_training_batches
    limit = int(num_batches) if num_batches < float("inf") else None
    return Epochs(trainer.train_dataloader, "DataLoader(..., drop_last=True)", limit)
