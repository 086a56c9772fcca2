"""``SFTTrainer``: TRL's trainer for supervised fine-tuning, with every training step run by a plan on all
ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
import trl
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....base.launched import is_launched
from ....base.patch import patched
from ....frontend.trace.outputs import IfGiven
from ....runtime.outputs import Output
from ..huggingface import Trainer
from .refusals import check_args, check_version
from .tokens import IGNORED, next_labels, token_counts, token_losses

COUNTS, AUX_LOSS = "counts", "aux_loss"


class SFTTrainer(Trainer, trl.SFTTrainer):
    """``trl.SFTTrainer`` for a script that every rank of ``torchrun`` runs; ``mixmesh.hf.Trainer`` tells what
    a step trains with. Losses and metrics are those of a single device.

    The constructor raises InputError for arguments that cannot be followed exactly.
    """

    args: trl.SFTConfig

    def __init__(
        self, model: Any, args: transformers.TrainingArguments | None = None, *others: Any, **kwargs: Any
    ) -> None:
        self._shown: dict[str, Any] | None = None  # values to log, while a loss is traced
        if is_launched():
            args = args or trl.SFTConfig("sft_trainer")
            check_version()
            check_args(args)
        super().__init__(model, args, *others, **kwargs)
        # the loss is traced before the first step, which would set it
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps

    # ---- the loss within a program

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        return {**options, "outputs": (*options.get("outputs", ()), IfGiven(COUNTS), IfGiven(AUX_LOSS))}

    def program_loss(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Any:
        with patched(self, "_shown", {}):
            loss = super().program_loss(model, inputs, num_items)
            return {"loss": loss, **self._shown} if self._shown else loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self._shown is None:  # evaluation, or a script without torchrun
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        given = {name: value for name, value in inputs.items() if name != "labels"}
        if self.aux_loss_enabled:
            given["output_router_logits"] = True
        outputs = model(**given, use_cache=False)
        logits = outputs.logits.float()
        following = next_labels(inputs["labels"], logits.shape[1])
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, inputs["labels"], num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None and self.args.loss_type == "nll":
            loss = self.label_smoother(
                outputs, inputs["labels"], shift_labels=True, num_items_in_batch=num_items_in_batch
            )
        else:
            loss = self._loss_of_tokens(outputs, logits, following, num_items_in_batch)
        self._shown[COUNTS] = token_counts(logits, following)
        if self.aux_loss_enabled:
            self._shown[AUX_LOSS] = outputs.aux_loss.detach()
        if return_outputs:  # TRL computes these again without gradients: a loss made of them trains nothing
            return loss, pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return loss

    def _loss_of_tokens(self, outputs: Any, logits: Tensor, following: Tensor, num_items: Any) -> Tensor:
        count = (following != IGNORED).sum() if num_items is None else num_items
        sum_of_tokens = token_losses(logits, following, self.args.loss_type).sum()
        loss = sum_of_tokens / torch.as_tensor(count).clamp(min=1)
        if self.aux_loss_enabled:
            num_parts = 1 if num_items is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / num_parts
        return loss

    # ---- what is logged

    def loss_of_step(self, out: Any, inputs: Mapping[str, Any]) -> Tensor:
        if not isinstance(out, Output):
            return out
        num_tokens, entropy, num_correct = torch.stack(out[COUNTS]).tolist()
        metrics = self._metrics["train"]
        metrics["entropy"].append(entropy / max(num_tokens, 1))
        metrics["mean_token_accuracy"].append(num_correct / max(num_tokens, 1))
        mask = inputs.get("attention_mask")
        self._total_train_tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        metrics["num_tokens"] = [self._total_train_tokens]
        if AUX_LOSS in out:
            metrics["aux_loss"].append(float(out[AUX_LOSS]))
        return out.loss
