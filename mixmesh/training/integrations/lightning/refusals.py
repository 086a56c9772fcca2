"""The settings of a Trainer or a LightningModule that the strategy cannot follow exactly, with an alternative
for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from ....base.callers import line_of_script
from ....errors import InputError, MixmeshError
from ....frontend.trace.locate import place_of_error, place_of_function
from ..launched import unlike_in_steps

MANUAL = "self.automatic_optimization = False in __init__: training_step then runs as it is written"
# callbacks -> what to do instead
CALLBACKS = {
    BatchSizeFinder: "choose batch_size on a single device; it is that of all devices together",
    LearningRateFinder: "find the learning rate on a single device, without the strategy",
    ModelPruning: "leave it out, and prune on a single device: it replaces parameters",
    StochasticWeightAveraging: "leave it out: it reads weights while they are in parts",
    WeightAveraging: "leave it out: it reads weights while they are in parts",
}
# attributes that only the Trainer knows, used in training_step -> what to write instead
OF_TRAINER = {
    "trainer": MANUAL,
    "global_step": "a buffer that training_step updates in place: self.step += 1",
    "current_epoch": "a buffer that training_step updates in place",
    "logger": "self.log(name, tensor)",
    "loggers": "self.log(name, tensor)",
    "global_rank": "leave it out: all ranks train on one batch",
    "local_rank": "leave it out: all ranks train on one batch",
}
METHODS_OF_TRAINER = {
    "optimizers": MANUAL,
    "lr_schedulers": MANUAL,
    "manual_backward": MANUAL,
    "toggle_optimizer": MANUAL,
    "untoggle_optimizer": MANUAL,
    "clip_gradients": "Trainer(gradient_clip_val=...)",
    "all_gather": "leave it out: training_step sees the whole batch",
    "print": "print in on_train_batch_end, or self.log(name, tensor)",
}

# by attribute, what to write in place of it in a forward that training_step of manual optimization calls
ARGUMENT = "an argument of forward, which training_step passes"
IN_FORWARD = dict.fromkeys(("trainer", "global_step", "current_epoch", "logger", "loggers"), ARGUMENT)


def check_training(trainer: pl.Trainer, module: pl.LightningModule, optimizers: list) -> None:
    """Raises InputError for the first setting under which training would differ from a single device's."""
    if module.automatic_optimization and len(optimizers) != 1:
        where = line_of(module.configure_optimizers)
        raise refused(
            f"{len(optimizers)} optimizers", "one optimizer from configure_optimizers", MANUAL, where
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise refused(
            "training_step(self, dataloader_iter)",
            "training_step(self, batch, batch_idx)",
            "batch in place of next(dataloader_iter); several loaders: CombinedLoader",
            line_of(module.training_step),
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise refused("torch.compile(module)", "the module itself", "leave torch.compile out")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # the connector sets it, past the stubs
        for kind, hint in CALLBACKS.items():
            if isinstance(callback, kind):
                raise refused(kind.__name__, "a Trainer without it", hint)


def check_precision(plugin: Precision) -> None:
    """Raises InputError for a precision under which sums over ranks differ from those of a single device."""
    if type(plugin) not in (Precision, DoublePrecision, MixedPrecision):
        raise refused(
            f"precision={plugin.precision!r}",
            "32-true, 64-true, bf16-mixed or 16-mixed",
            'precision="bf16-mixed"',
        )


def check_device(device: torch.device, planned: torch.device) -> None:
    """Raises InputError if the Trainer was told to use another device than the plan's."""
    if device.type != planned.type:
        raise refused(
            f"accelerator of {device.type}",
            f"{planned}, as this process has it",
            'leave accelerator= out; to train on CPUs: accelerator="cpu", CUDA_VISIBLE_DEVICES= torchrun ...',
        )


def refused(got: str, expected: str, hint: str, where: str = "") -> InputError:
    """The error for a setting that ``mixmesh.lightning.Strategy`` cannot follow."""
    return InputError(
        "mixmesh.lightning.Strategy cannot keep this exactly",
        expected=expected,
        got=got,
        where=where,
        hint=hint,
    )


@contextmanager
def naming_lines(training_step: Callable[..., Any]) -> Iterator[None]:
    """A context in which errors name the script's line from which they came, or ``training_step``."""
    try:
        yield
    except MixmeshError as error:
        if not error.where:
            place = place_of_error(error)
            error.where = place.location if place.by_user else line_of(training_step)
        raise


def line_of(method: Callable[..., Any]) -> str:
    """The line at which a method of the script begins."""
    return place_of_function(inspect.unwrap(method)).location


def in_training_step(name: str, hint: str) -> InputError:
    """The error for a ``training_step`` that uses values which change from step to step."""
    return unlike_in_steps("training_step", name, hint)


def in_forward(name: str, hint: str) -> InputError:
    """The error for a ``forward`` of a LightningModule that uses values which change from step to step."""
    return unlike_in_steps("forward", f"self.{name}", hint)


def called_within(name: str, whole: str) -> InputError:
    """The error for calling a module within a part, whose weights are planned as a part of it."""
    return InputError(
        f"training_step calls {name}, which is planned as a part of {whole}",
        expected=f"calls of {whole} alone, or of its modules alone",
        got=f"{name}(...), after {whole}(...)",
        where=line_of_script(),
        hint=f"{whole}.forward(...) in place of {whole}(...), whose modules are then planned one by one",
    )


class BatchIndex:
    """Stands for ``batch_idx`` while ``training_step`` is traced: it may be passed on, but not used."""

    def _refuse(self, *_: Any) -> Any:
        raise in_training_step("batch_idx", "a buffer that training_step updates in place: self.step += 1")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __neg__ = __str__ = _refuse
    __format__ = __hash__ = __repr__ = _refuse
