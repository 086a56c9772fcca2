"""A parallel model that trains by its plan and evaluates like the script's own module. The script sees one
model on one device: every rank passes whole batches and gets whole outputs."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from ....runtime.modes import modes_by_name, set_modes_like
from ....runtime.outputs import Output
from ....runtime.parallel import ParallelModel
from ....runtime.whole_model import own_module
from ...preparation.loading import same_random_numbers
from ..launched import check_alike, learning_rates
from ..lending import Lender

DRAWN_ALONE = "accelerator.wait_for_everyone() after what draws numbers on one rank alone, is_main_process"


class _AsOneDevice(nn.Module):
    """A class that comes before that of a parallel model in its bases."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lender = self.__dict__["_lender"]
        if _evaluates(self):
            return lend_in_its_modes(lender)(*args, **kwargs)
        _follow_modes(self, lender)
        lender.take_back()
        check_alike((args, kwargs), learning_rates(self.__dict__["_optimizer"]), DRAWN_ALONE)
        with same_random_numbers():  # ranks draw different numbers here, but the same ones for the next batch
            out = super().__call__(*args, **kwargs)
        return out.everywhere() if isinstance(out, Output) else out

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if "_lender" in self.__dict__:  # to the script, this is its own module
            set_modes_of(self.__dict__["_lender"].original, self)
        return self


class _WithLoss(nn.Module):
    """A class that comes before that of a model with a loss, for use if nothing is parallel."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _evaluates(self):
            return super().__call__(*args, **kwargs)
        own = own_module(self)
        own.training = self.training
        return own(*args, **kwargs)


def _evaluates(model: nn.Module) -> bool:
    return not (model.training or torch.is_grad_enabled())


def lend_in_its_modes(lender: Lender) -> nn.Module:
    """The script's own module, with the training mode of every submodule as in the parallel model."""
    _follow_modes(lender.parallel, lender)
    module = lender.lend()
    for each in (module, lender.original):  # a different module if the original was loaded in the meantime
        set_modes_of(each, lender.parallel)
    return module


def set_modes_of(module: nn.Module, parallel: nn.Module) -> None:
    """Gives each module within the script's own the mode that it has in the parallel model."""
    set_modes_like(module, parallel)
    parallel.__dict__["_shown_modes"] = modes_by_name(module)


def _follow_modes(parallel: nn.Module, lender: Lender) -> None:
    """Passes on to the parallel model the modes that the script has since set on its own module, as by
    ``accelerator.unwrap_model(model).norm.eval()``."""
    before = parallel.__dict__["_shown_modes"]
    for name, each in lender.original.named_modules():
        if each.training != before.get(name, each.training):
            parallel.get_submodule(name).training = each.training
            before[name] = each.training


def as_one_device(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> Lender:
    """Makes ``parallel`` evaluate like the script's own module. Returns the lender of that module."""
    lender = Lender(parallel)
    lender.follow(optimizer)  # a script may evaluate between backward and the step
    parallel.__dict__.update(
        _lender=lender, _optimizer=optimizer, _shown_modes=modes_by_name(lender.original)
    )
    _put_before_class(_AsOneDevice, parallel)
    return lender


def without_loss_in_evaluation(model: nn.Module) -> nn.Module:
    """Makes a model with a loss evaluate like the script's own module."""
    _put_before_class(_WithLoss, model)
    return model


def _put_before_class(kind: type, model: nn.Module) -> None:
    original = type(model)
    model.__class__ = type(original.__name__, (kind, original), {"__module__": original.__module__})
