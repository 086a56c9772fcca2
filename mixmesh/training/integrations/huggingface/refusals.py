"""The arguments of a Trainer that a parallel one cannot reproduce exactly, with an alternative for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers

from ....errors import InputError
from ..launched import unlike_in_steps

# methods of Trainer that this package extends, by their names in transformers 5.23
EXTENDED = (
    "_prepare_for_training", "_wrap_model", "_get_dataloader", "_finalize_training", "_load_best_model",
    "_save", "_save_checkpoint", "_save_rng_state", "_save_optimizer_and_scheduler",
    "_maybe_log_save_evaluate",
)  # fmt: skip
COVERED = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")  # names in mixmesh.hf
OTHER_LIBRARIES = frozenset(("trl", "sentence_transformers"))
EXACT_OPTIMIZERS = frozenset(("adafactor", "adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"))
# attributes that change from step to step, in compute_loss -> what to write instead
OF_TRAINING = {
    "state": "a buffer of the model that its forward updates in place: self.step += 1",
    "control": "a callback",
    "callback_handler": "a callback",
    "optimizer": "leave it out: compute_loss is called for a batch, before the step",
    "lr_scheduler": "leave it out: compute_loss is called for a batch, before the step",
    "log": "compute_metrics, or a callback's on_step_end",
    "evaluate": "eval_strategy='steps'",
}


@dataclass(frozen=True)
class Refusal:
    """An argument, or the ``field`` of one, that is refused if ``is_set`` is true for the arguments; ``hint``
    is the alternative."""

    name: str
    is_set: Callable[[Any], Any]
    hint: str
    field: str = ""

    def got(self, args: Any) -> str:
        """The text of the refused value, as it was written."""
        value = getattr(args, self.name)
        if self.field:
            value = {self.field: getattr(value, self.field)}
        return f"{self.name}={value!r}"


def _flag(name: str, hint: str) -> Refusal:
    return Refusal(name, lambda args: getattr(args, name, None), hint)


REFUSALS = (
    _flag("fsdp", "leave fsdp out: the plan decides which parameters are cut, and where"),
    _flag("deepspeed", "leave deepspeed out: the plan decides which parameters are cut, and where"),
    _flag("parallelism_config", "leave parallelism_config out: the plan decides the parallelism"),
    _flag("torch_compile", "leave torch_compile out"),
    _flag("fp16_full_eval", "leave fp16_full_eval out"),
    _flag("bf16_full_eval", "leave bf16_full_eval out"),
    _flag("use_liger_kernel", "leave use_liger_kernel out"),
    _flag("auto_find_batch_size", "per_device_train_batch_size=N, which is then the batch of all devices"),
    _flag("debug", "leave debug out"),
    _flag("enable_jit_checkpoint", "leave enable_jit_checkpoint out, and write save_steps=N"),
    _flag("push_to_hub", "leave push_to_hub out, and call trainer.push_to_hub() on rank 0 after train()"),
    Refusal(
        "accelerator_config",
        lambda args: getattr(args.accelerator_config, "dispatch_batches", None),
        "accelerator_config without dispatch_batches: every rank loads the batches",
        field="dispatch_batches",
    ),
    Refusal(
        "optim",
        lambda args: str(getattr(args.optim, "value", args.optim)) not in EXACT_OPTIMIZERS,
        f"optim= one of {', '.join(sorted(EXACT_OPTIMIZERS))}, or Trainer(..., optimizers=(optimizer, None))",
    ),
)


def check_version() -> None:
    """Raises InputError for a version of transformers whose Trainer lacks a method that is extended."""
    missing = [name for name in EXTENDED if not hasattr(transformers.Trainer, name)]
    if missing:
        raise InputError(
            "this version of transformers has another Trainer",
            expected=f"transformers 5.23: Trainer.{', Trainer.'.join(missing)}",
            got=f"transformers {transformers.__version__}",
            hint="pip install 'transformers>=5.23,<6'",
        )


def check_args(args: transformers.TrainingArguments) -> None:
    """Raises InputError for the first argument that is refused."""
    for refusal in REFUSALS:
        if refusal.is_set(args):
            raise InputError(
                f"a parallel Trainer does not take this {refusal.name}",
                expected="an optimizer known to be exact" if refusal.name == "optim" else "it left out",
                got=refusal.got(args),
                hint=refusal.hint,
            )


def check_methods(kind: type[transformers.Trainer], ours: type[transformers.Trainer]) -> None:
    """Raises InputError for a subclass with a training step of its own, which would never run."""
    if kind.training_step is not ours.training_step:
        raise InputError(
            f"{kind.__name__}.training_step would not run: forward and backward are the planned program",
            expected="Trainer.training_step",
            got="a training_step of your own",
            hint=(
                "a compute_loss of your own, with the arguments of Trainer.compute_loss",
                "a model whose forward returns the loss",
            ),
        )


def check_library(kind: type[transformers.Trainer]) -> None:
    """Raises InputError for a subclass that is a Trainer of another library too, unless mixmesh has its own
    of that name."""
    library = {c.__module__.partition(".")[0]: c for c in reversed(kind.__mro__)}  # the first class of each
    covered = {c.__name__ for c in kind.__mro__ if c.__module__.startswith("mixmesh.")}
    for name in OTHER_LIBRARIES & library.keys():
        if library[name].__name__ not in covered:
            raise not_covered(library[name].__name__)


def not_covered(name: str) -> InputError:
    """The error for a Trainer of another library that mixmesh does not follow."""
    has_own = name in COVERED
    return InputError(
        f"a plan cannot train by the steps of this {name}" if has_own else f"mixmesh has no {name}",
        expected=f"{', '.join(COVERED[:-1])} or {COVERED[-1]} of mixmesh.hf",
        got=name,
        hint=(
            f"from mixmesh.hf import {name}"
            if has_own
            else "a loop of your own, with mixmesh.prepare(model, optimizer, loader); what a frozen model "
            "gives for a sample, such as the reference of DPO, can be part of the batch, computed before",
            f"without torchrun, on one device, the library's own {name}",
        ),
    )


def check_own_methods(trainer: Any) -> None:
    """Raises InputError for a ``compute_loss`` that was set on the Trainer itself: the loss of a step is that
    of its class."""
    if "compute_loss" in vars(trainer):
        raise InputError(
            "trainer.compute_loss was set on the Trainer, and would not be the loss that trains",
            expected="a compute_loss of a subclass",
            got="trainer.compute_loss = ...",
            hint=(
                "class MyTrainer(mixmesh.hf.Trainer): def compute_loss(self, model, inputs, **kwargs): ...",
                "Trainer(..., compute_loss_func=...), for a loss of the outputs and the labels",
            ),
        )


def in_compute_loss(name: str, hint: str) -> InputError:
    """The error for a ``compute_loss`` that uses values which change from step to step."""
    return unlike_in_steps("compute_loss", name, hint)


def refused(what: str, hint: str) -> InputError:
    """The error for a call that a parallel Trainer refuses."""
    return InputError(what, hint=hint)
