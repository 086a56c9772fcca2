"""The arguments and calls of an Accelerator that a parallel one cannot reproduce exactly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from ....base.callers import line_of_script
from ....errors import InputError

PLAN_DECIDES = "the plan decides which parameters are cut, and where"
WITHOUT = "leave {} out"
REFUSED = {
    "fsdp_plugin": PLAN_DECIDES,
    "deepspeed_plugin": PLAN_DECIDES,
    "deepspeed_plugins": PLAN_DECIDES,
    "megatron_lm_plugin": PLAN_DECIDES,
    "torch_tp_plugin": PLAN_DECIDES,
    "parallelism_config": PLAN_DECIDES,
    "dynamo_backend": "the program is compiled by mixmesh",
    "dynamo_plugin": "the program is compiled by mixmesh",
}
# environment variables that `accelerate launch` sets
VARIABLES = (
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)  # fmt: skip
PRECISIONS = ("no", "bf16", "fp16")
LOADER_OPTIONS = ("dispatch_batches", "use_stateful_dataloader")
TOGETHER = (
    "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)"
    "  # the training loader first, in one call"
)
ONE_BY_ONE = (
    'accelerator.prepare(generator, its_optimizer, loader, planning={"batch": (noise,)}), and then the other '
    "model with its optimizer, in a call of its own"
)
WITHOUT_PLAN = (
    "accelerator.backward of a loss that no plan computes: every rank does all the work of a single device. "
    f"To share it: {TOGETHER}"
)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises InputError for the first argument, or variable of ``accelerate launch``, that is not
    supported."""
    for name, reason in REFUSED.items():
        if arguments.get(name) is not None:
            raise _without(name, repr(arguments[name]), reason)
    for name in VARIABLES:
        if os.environ.get(name, "false").lower() == "true":
            raise _without(name, f"{name}=true", "torchrun --nproc-per-node gpu script.py")
    config = arguments.get("dataloader_config")
    for name in LOADER_OPTIONS:
        if getattr(config, name, None):
            raise _without(name, f"{name}=True", WITHOUT.format(name))


def check_accelerator(accelerator: Accelerator) -> None:
    """Raises InputError for the precision and the compiler, which only a constructed Accelerator knows."""
    if accelerator.mixed_precision not in PRECISIONS:
        raise InputError(
            "a parallel Accelerator does not take this mixed_precision",
            expected=" or ".join(PRECISIONS),
            got=str(accelerator.mixed_precision),
            hint='Accelerator(mixed_precision="bf16")',
        )
    if accelerator.state.dynamo_plugin.backend != "NO" or accelerator.distributed_type != DistributedType.NO:
        raise _without(
            "dynamo_backend",
            f"{accelerator.state.dynamo_plugin.backend}, {accelerator.distributed_type}",
            REFUSED["dynamo_backend"],
        )


def check_prepared(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    loaders: Sequence[Any],
    has_batch: bool = False,
) -> None:
    """Raises InputError unless ``prepare`` was called with a model, its optimizer and its loader, or without
    anything to train. ``has_batch`` is whether ``planning`` has a batch, in place of the loader."""
    if optimizers and ((len(models), len(optimizers)) != (1, 1) or not (loaders or has_batch)):
        raise _not_together(
            f"{len(models)} models, {len(optimizers)} optimizers, {len(loaders)} loaders",
            ONE_BY_ONE if len(models) > 1 else TOGETHER,
        )


def check_planned(optimizer: Any) -> None:
    """Raises InputError for an optimizer that ``prepare`` has not planned together with its model."""
    if not getattr(optimizer, "_is_accelerate_prepared", False):
        raise _not_together("accelerator.prepare_optimizer(optimizer) by itself", TOGETHER)


def check_summed(parameters: Iterable[Tensor], models: Iterable[nn.Module], method: str) -> None:
    """Raises InputError if a parameter belongs to one of the parallel ``models``, whose gradients are summed
    with those of the last batch of an optimizer step."""
    unsummed = {id(p) for model in models for p in model.parameters()}
    if any(id(p) in unsummed for p in parameters):
        raise InputError(
            f"{method} before the last batch of an optimizer step: gradients are not summed yet",
            expected="gradients of all batches of the step",
            got="accelerator.sync_gradients = False",
            where=line_of_script(),
            hint=f"if accelerator.sync_gradients: accelerator.{method}(...)",
        )


def _not_together(got: str, hint: str) -> InputError:
    return InputError(
        "prepare plans one model with its optimizer, by a batch of its loader",
        expected="one model, one optimizer and its training loader in one call",
        got=got,
        where=line_of_script(),
        hint=hint,
    )


def _without(name: str, got: str, hint: str) -> InputError:
    return InputError(
        f"a parallel Accelerator does not take {name}", expected="it left out", got=got, hint=hint
    )
