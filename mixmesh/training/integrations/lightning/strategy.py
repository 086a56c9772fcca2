"""``Strategy``: every training step of Lightning's Trainer is run by a plan on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from ....errors import InputError
from ....frontend.trace.outputs import IfGiven
from ....runtime.comm import default_device, initialise
from ....runtime.first_rank import from_first_rank, wait_for_all
from ....runtime.parallel import ParallelModel, full_optimizer_state_dict
from ...preparation.loading import same_random_numbers
from ...preparation.script import prepare
from ..launched import (
    check_alike,
    is_launched,
    keep_metrics_apart,
    learning_rates,
    take_random_numbers,
)
from ..lending import Lender
from ..weights import fill
from .refusals import check_device, check_precision, check_training, refused
from .step import LOGGED, Form, TrainingStep, size_of

TIMEOUT_S = 300.0


class Strategy(SingleDeviceStrategy):
    """Trains with all processes of ``torchrun`` as with a single device.

    Every rank runs the script and reads the same, whole batches. The devices are detected, and
    ``training_step`` is planned with what it logs, when the first batch is there; ``planning`` holds
    arguments for that, as ``mixmesh.prepare`` takes them (``{"profile_s": 0}``). While it trains, the
    module's weights are in the ranks' parts, and hooks and callbacks that read them are refused; validation,
    checkpoints and the end of ``fit`` have them whole in the module, on every rank. Without torchrun it is a
    single device.

    Raises InputError when ``fit`` starts, for what cannot be kept exactly.
    """

    strategy_name = "mixmesh"

    def __init__(self, *, planning: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.planning = dict(planning or {})
        self.parallel: ParallelModel | None = None  # from the first batch on
        self._step: TrainingStep | None = None
        self._lender: Lender | None = None
        self._modes: dict[str, bool] = {}
        self._has_trained = False

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
            initialise(int(os.environ["WORLD_SIZE"]), default_device(), TIMEOUT_S)
            keep_metrics_apart()
        super().setup_environment()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        wait_for_all("a barrier of Lightning")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return from_first_rank(lambda: obj) if dist.is_initialized() else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The first rank's: devices may round otherwise, and all must decide alike."""
        return self.broadcast(decision)

    # ---- training

    def setup(self, trainer: pl.Trainer) -> None:
        fits = is_launched() and trainer.state.fn == TrainerFn.FITTING
        if fits and self.parallel is not None:
            raise refused("a second fit", "one fit of a Trainer", "make a new Trainer, with a new Strategy()")
        super().setup(trainer)
        if fits:
            check_training(trainer, self.lightning_module, self.optimizers)
            check_precision(self.precision_plugin)
            take_random_numbers()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Plans by the first batch: before the optimizer's first step, which runs the training step."""
        if not is_launched() or self.parallel is not None:
            return
        module, (optimizer,) = self.lightning_module, self.optimizers
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        step = TrainingStep(module, batch, takes_index)
        self._modes = _modes(module)
        with self.precision_plugin.train_step_context():
            options = {"outputs": (IfGiven(LOGGED),), **self.planning}
            parallel, _, _ = prepare(step, optimizer, [step.tensors], **options)
        step.log.keep(from_first_rank(lambda: step.log.entries))  # only one rank traces
        module.zero_grad = parallel.zero_grad  # before validation Lightning asks the module for it
        self.parallel, self._step, self._lender = parallel, step, Lender(parallel)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.parallel is None:
            return super().training_step(*args, **kwargs)
        batch, module, step = args[0], self.lightning_module, self._step
        self._lender.take_back()
        form, tensors = Form.of(batch)
        check_alike(tensors, learning_rates(self.optimizers[0]))
        self._check_as_planned(form)
        # ranks draw other numbers here, and must draw their next batches alike
        with self.precision_plugin.train_step_context(), same_random_numbers(), self._unless_stepping():
            out = self.parallel(**tensors)
        if any(each.key is not None for each in step.log.entries):
            out = out.everywhere()
        for each in step.log.entries:
            each.log(module, out, size_of(batch))
        return out.loss

    def _check_as_planned(self, form: Form) -> None:
        modes = _modes(self.lightning_module)
        if modes != self._modes:
            changed = [name or "the module" for name, mode in modes.items() if mode != self._modes.get(name)]
            raise InputError(
                "modules train that evaluated when the step was planned, or the other way round",
                expected="the modes of the first step",
                got=", ".join(changed[:3]),
                hint="module.eval() of a frozen part in on_fit_start, or a new Trainer from there on",
            )
        if form != self._step.form:
            raise InputError(
                "the batch has another form than the one that was planned",
                expected=f"{self._step.form.spec}, {self._step.form.constants}",
                got=f"{form.spec}, {form.constants}",
                hint=(
                    "a collate_fn that returns the same names, numbers that change as tensors, and no words "
                    "that change"
                ),
            )

    def _unless_stepping(self) -> Any:
        """Leaves gradients unsummed where another batch of the same optimizer step follows."""
        follows = self.lightning_module.trainer.fit_loop._should_accumulate()
        return self.parallel.no_sync() if follows else nullcontext()

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.parallel is None:
            return super().backward(closure_loss, *args, **kwargs)
        with same_random_numbers(), self._unless_stepping():  # regions are computed again
            return super().backward(closure_loss, *args, **kwargs)

    # ---- the whole module

    def _lend(self) -> None:
        if self.parallel is not None and not self._has_trained:
            self._lender.lend()

    def on_validation_start(self) -> None:
        self._lend()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._lend()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        if self.parallel is None:
            return super().optimizer_state(optimizer)
        return full_optimizer_state_dict(self.parallel, getattr(optimizer, "_optimizer", optimizer))

    def on_train_end(self) -> None:
        if self.parallel is not None and not self._has_trained:
            self._lender.take_back()
            fill(self._step, self.parallel)
            del self.lightning_module.zero_grad
            self._has_trained = True

    def teardown(self) -> None:
        if self.parallel is None:
            return super().teardown()
        if self._has_trained:
            self.lightning_module.cpu()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        return None


def _modes(module: torch.nn.Module) -> dict[str, bool]:
    """Whether each module trains, by name."""
    return {name: each.training for name, each in module.named_modules()}
