"""``Trainer``: the Hugging Face Trainer, with every training step run by a plan on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ....base.launched import is_launched
from ....base.patch import patched
from ....errors import InputError
from ....frontend.trace.own_generators import generators_in
from ....runtime.first_rank import from_first_rank
from ....runtime.parallel import ParallelModel, full_optimizer_state_dict
from ....runtime.scaler import with_agreement
from ...preparation.lengths import length
from ...preparation.loading import example_batch, load, same_random_numbers
from ..accelerate.one_process import as_first_process, look_like_one_process
from ..launched import (
    Epochs,
    check_alike,
    check_not_spread,
    check_scaled,
    prepare_for,
)
from ..weights import fill, whole_weights
from .decisions import share_decisions
from .loss import NUM_ITEMS, with_trainer_loss
from .refusals import (
    check_args,
    check_library,
    check_methods,
    check_own_methods,
    check_version,
    refused,
)


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for a script that every rank of ``torchrun`` runs.

    A step trains with ``per_device_train_batch_size`` samples times ``gradient_accumulation_steps`` **on all
    devices together**, with the loss, the gradients and the clipping of a single device. All ranks read the
    same batches. The devices are detected and the step is planned when ``train`` starts; ``planning`` holds
    arguments of ``mixmesh.prepare`` for that (``{"profile_s": 0}``). During training every rank holds only
    its part of the weights, and callbacks that read them are refused; evaluation, saving and the end of
    ``train`` see them whole in ``trainer.model``, on every rank. Without torchrun nothing changes.

    The constructor raises InputError for arguments that cannot be followed exactly.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *others: Any,
        planning: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.planning = dict(planning or {})
        self.parallel: ParallelModel | None = None  # set while it trains
        self._has_trained = False
        self._is_in_turn = False  # whether it is about to log, evaluate and save, on all ranks
        self._is_whole = False  # whether the script's own model has whole weights for a while, as it trains
        self._example: dict[str, Any] = {}  # a batch by which to plan, while training is being prepared
        self._epochs: Epochs | None = None  # the training to prepare for
        if is_launched():
            check_version()
            check_library(type(self))
            args = args or transformers.TrainingArguments(output_dir="tmp_trainer")
            check_args(args)
            check_methods(type(self), Trainer)
            # this is where Accelerate joins the other processes
            look_like_one_process(args.distributed_state)
            args.average_tokens_across_devices = False  # every rank sees all tokens
        super().__init__(model, args, *others, **kwargs)
        if is_launched():
            check_not_spread(self.model)
            share_decisions(
                self.callback_handler, lambda: self.parallel is not None, lambda: self._is_in_turn
            )

    # ---- data

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_launched():
            return super()._get_dataloader(dataset, *args, **kwargs)
        with as_first_process(self.args.distributed_state):  # otherwise workers would be seeded by the rank
            return super()._get_dataloader(dataset, *args, **kwargs)

    def _example_batch(self, loader: Any) -> dict[str, Any]:
        """A batch of the full size in the form in which ``compute_loss`` gets it. Restores the state of
        random numbers."""
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        with same_random_numbers(generators_in(loader)):
            if is_stream:
                batch = example_batch(getattr(loader, "base_dataloader", loader))
            elif isinstance(loader, DataLoader):
                batch = load(loader, list(range(min(self._train_batch_size, length(loader.dataset)))))
            else:  # batches of the script's own, from its get_train_dataloader
                batch = next(iter(loader))
            batch = self._prepare_inputs(batch)
        num_items = self._get_num_items_in_batch([batch], self.args.device)
        return dict(batch) if num_items is None else {**batch, NUM_ITEMS: num_items}

    # ---- training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if is_launched() and self._has_trained:
            raise refused("this Trainer has trained already", "make a new Trainer(model, args, ...)")
        return super().train(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        if is_launched():
            raise refused("a parallel Trainer trains once", "search without torchrun, on a single device")
        return super().hyperparameter_search(*args, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if is_launched():
            self._example = self._example_batch(train_dataloader)
            drop_last = "TrainingArguments(dataloader_drop_last=True)"
            num_batches = max_steps * self.args.gradient_accumulation_steps
            self._epochs = Epochs(train_dataloader, drop_last, num_batches)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)
        if self.parallel is not None:  # the weights that train
            self.callback_handler.model = self.parallel
        return prepared

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The parallel model, in training; the optimizer steps on its parameters from then on."""
        if not (is_launched() and training):
            return super()._wrap_model(model, training, dataloader)
        check_own_methods(self)
        model = self.accelerator.prepare_model(model, evaluation_mode=True)
        model.train()  # training steps run in this mode
        assert self.optimizer is not None  # the Trainer creates it before it wraps the model
        parallel, optimizer = prepare_for(
            with_trainer_loss(model, self),
            self.optimizer,
            self._example,
            self._options(),
            self._epochs,
            self.args.gradient_accumulation_steps,
        )
        check_scaled(parallel, self.accelerator.scaler, "TrainingArguments(fp16=True)")
        if self.accelerator.scaler is not None:
            self.accelerator.scaler = with_agreement(self.accelerator.scaler)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)
        # otherwise the Trainer would have it prepared once more
        vars(self.optimizer)["_is_accelerate_prepared"] = True
        self._example, self._epochs, self._has_trained, self.parallel = {}, None, True, parallel
        return parallel

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.parallel is None:
            return super().training_step(model, *args, **kwargs)
        self._own_model.train()
        accumulates = not self.accelerator.sync_gradients  # another batch of the same optimizer step follows
        in_program = MethodType(Trainer.compute_loss, self)  # the loss of a subclass is a part of the program
        with (
            same_random_numbers(),  # ranks draw different numbers here, but the same ones for the next batch
            self.parallel.no_sync() if accumulates else nullcontext(),
            patched(self, "compute_loss", in_program),
        ):
            return super().training_step(model, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with patched(self, "_is_in_turn", True):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        # not ``self.parallel``: a trace would note it as a number that the loss reads, and that changes
        if not isinstance(model, ParallelModel):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            raise refused("outputs are not kept in training", "trainer.predict(dataset), or compute_metrics")
        if num_items_in_batch is not None:
            inputs = {**inputs, NUM_ITEMS: num_items_in_batch}
        check_alike(inputs)
        return self.loss_of_step(model(**inputs), inputs)

    def _options(self) -> dict[str, Any]:
        """The arguments of ``mixmesh.prepare`` for this Trainer."""
        return self.planning

    def program_loss(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Any:
        """The result of a step for a batch: the loss, or a dict of it and what else the Trainer shows."""
        return self.compute_loss(model, inputs, num_items_in_batch=num_items)

    def loss_of_step(self, out: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The loss in ``out``, the result of a step for ``inputs``."""
        return out

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.parallel is not None:  # the best model is loaded into the script's own, which callbacks see
            fill(self._own_model, self.parallel)
            self.parallel, self.model_wrapped = None, self._own_model
            self.callback_handler.model = self._own_model
        return super()._finalize_training(*args, **kwargs)

    @property
    def _own_model(self) -> nn.Module:
        assert self.model is not None  # comes from the arguments or from model_init
        return self.model

    # ---- evaluation and files

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A context in which the script's own model, and that of callbacks, has whole weights."""
        if self.parallel is None or self._is_whole:
            yield
            return
        in_callbacks = patched(self.callback_handler, "model", self._own_model)
        with whole_weights(self._own_model, self.parallel), in_callbacks, patched(self, "_is_whole", True):
            yield

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole():
            output = super().evaluation_loop(*args, **kwargs)
        if self.parallel is None:
            return output
        self._own_model.eval()  # as on one device, until the next training step
        # devices may round differently, but all ranks must make the same decisions from the metrics
        return output._replace(metrics=from_first_rank(lambda: output.metrics))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.parallel is None or state_dict is not None:
            return super()._save(output_dir, state_dict)
        with self._whole():
            super()._save(output_dir)
        return None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save = self.save_model  # perhaps that of a subclass, which reads self.model

        def save_whole(*args: Any, **kwargs: Any) -> None:
            with self._whole():
                save(*args, **kwargs)

        with patched(self, "save_model", save_whole):
            super()._save_checkpoint(model, trial)
        if self.parallel is not None:  # another rank may have looked for the folder before it was written
            self.state.best_model_checkpoint = from_first_rank(lambda: self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.parallel is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        assert isinstance(self.optimizer, AcceleratedOptimizer) and self.lr_scheduler is not None  # it trains
        state = full_optimizer_state_dict(self.parallel, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
        return None

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save or not is_launched():  # random numbers agree on all ranks
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        try:
            super()._load_best_model()
        except OSError as error:
            raise InputError(
                "the best checkpoint cannot be read on this rank",
                expected="an output_dir that all machines share",
                got=str(error),
                hint="leave load_best_model_at_end out, or share the folder",
            ) from error


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """The same for ``transformers.Seq2SeqTrainer``. Every rank generates for the whole data set."""
