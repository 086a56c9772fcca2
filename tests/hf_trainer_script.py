"""A script for one device that trains tiny models with the Trainer of a library: arguments FOLDER LIBRARY.

``test_hf_trainer`` runs it with that of ``transformers``, and under torchrun with that of ``mixmesh.hf``."""

from __future__ import annotations

import importlib
import os
import random
import sys
from functools import partial
from pathlib import Path

import torch
from launches import CLUSTER, WITHOUT_BF16, cluster_file, rank, tell
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import mixmesh
from mixmesh.errors import InputError, TraceError

FOLDER, LIBRARY = Path(sys.argv[1]), sys.argv[2]
SEEN: list[int] = []  # a sum over the tokens of each batch that this process made
Trainer = importlib.import_module(LIBRARY).Trainer
Seq2SeqTrainer = importlib.import_module(LIBRARY).Seq2SeqTrainer
if LIBRARY == "mixmesh.hf":

    def trainer_with(planner: str, kind: type = Trainer, cluster: str = CLUSTER):
        kept = {"cache": FOLDER / "cache", "cluster": cluster_file(FOLDER, cluster)}
        return partial(kind, planning={"profile_s": 0, "planner": planner, **kept})
else:

    def trainer_with(planner: str, kind: type = Trainer):
        return kind


def arguments(name: str, kind: type = TrainingArguments, **changed) -> TrainingArguments:
    options = dict(
        output_dir=str(FOLDER / name), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-2,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=3,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return kind(**{**options, **changed})


def language_model() -> GPT2LMHeadModel:
    set_seed(0)
    sizes = dict(vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)).double()


def sentences(count: int) -> list[dict]:
    """Tokens with labels, of which each has another number to be left out."""
    rows = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [
        {"input_ids": row, "labels": row.where(torch.arange(8) >= n % 5, torch.tensor(-100))}
        for n, row in enumerate(rows)
    ]


def with_random_tokens(rows: list[dict]) -> dict:
    """A batch of the length that its first row asks for, some of its tokens drawn anew."""
    length = 6 + int(rows[0]["input_ids"][0]) % 3
    batch = {key: torch.stack([row[key] for row in rows])[:, :length] for key in rows[0]}
    tokens = batch["input_ids"]
    drawn = torch.rand(tokens.shape) < 0.2
    tokens = torch.where(drawn, random.randrange(32), tokens)
    SEEN.append(int(tokens.sum()))
    return {**batch, "input_ids": tokens}


def classifier(seed: int = 0, kind: type = BertForSequenceClassification) -> BertForSequenceClassification:
    set_seed(seed)
    sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = BertConfig(**sizes, **dropout, intermediate_size=32, max_position_embeddings=12, num_labels=3)
    return kind(config).double()


def labelled(count: int) -> list[dict]:
    tokens = torch.randint(32, (count, 6), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": int(row[0]) % 3} for row in tokens]


def accuracy(predicted) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


class Modes(TrainerCallback):
    """Tells whether the modules of the script's model train, at every step of the optimizer."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        modes = {module.training for module in model.modules()}
        state.log_history.append({"all_train": float(modes == {True}), "step": state.global_step})


def tokens_loss(outputs, labels, num_items_in_batch=None):
    """The mean over the tokens of all batches of a step, with a penalty on large logits."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    entropy = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return (entropy + 1e-2 * logits.square().mean(-1).sum()) / num_items_in_batch


def done(name: str, trainer) -> None:
    """Saves the model, and tells what was logged on this rank."""
    trainer.save_model(str(FOLDER / name / "final"))
    timed = ("runtime", "per_second", "time", "flos")
    history = [
        {key: value for key, value in row.items() if not any(word in key for word in timed)}
        for row in trainer.state.log_history
    ]
    tell(FOLDER, name, history=history, seen=SEEN, writes=trainer.args.should_save)
    SEEN.clear()


def language(name: str, planner: str, resumed_at: str | None = None, **changed) -> None:
    """Unequal numbers of tokens per batch, a smaller last one, two batches a step, clipping, evaluation and
    checkpoints between."""
    args = arguments(
        name, gradient_accumulation_steps=2, max_grad_norm=0.3, eval_strategy="epoch", save_strategy="epoch",
        weight_decay=0.1, warmup_steps=1, **changed,
    )  # fmt: skip
    data = dict(train_dataset=sentences(11), eval_dataset=sentences(5), data_collator=with_random_tokens)
    trainer = trainer_with(planner)(language_model(), args, **data, callbacks=[Modes()])
    trainer.train(resume_from_checkpoint=resumed_at)
    done(name, trainer)


def short(name: str, planner: str, **changed) -> None:
    """A loss function, and regions that are computed again, in float32 or under autocast."""
    args = arguments(name, activation_checkpointing=True, max_steps=5, **changed)
    data = dict(train_dataset=sentences(12), data_collator=with_random_tokens, compute_loss_func=tokens_loss)
    trainer = trainer_with(planner)(language_model().float(), args, **data)
    if args.fp16:  # Accelerate scales on accelerators only
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    trainer.train()
    if args.fp16:
        trainer.log({"scale": trainer.accelerator.scaler.get_scale()})
    done(name, trainer)


def classes(name: str, planner: str) -> None:
    """A loss outside of the model, metrics, and the best model in the end."""
    args = arguments(
        name, label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss", optim="sgd",
        use_cpu=False,
    )  # fmt: skip
    data = dict(train_dataset=labelled(10), eval_dataset=labelled(7), compute_metrics=accuracy)
    trainer = trainer_with(planner)(classifier(), args, **data)
    trainer.train()
    trainer.log({f"after_{key}": value for key, value in trainer.evaluate().items() if "per" not in key})
    done(name, trainer)


class Weighted(Trainer):
    """A ``compute_loss`` as scripts write it, with a teacher whose weights are fixed. If it is to, it notes
    each step in an attribute."""

    teacher: BertForSequenceClassification
    calls: int | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        weight = torch.tensor([1.0, 2.0, 0.5], dtype=wanted.dtype)
        loss = F.cross_entropy(outputs.logits, labels, weight) + F.mse_loss(outputs.logits, wanted)
        if self.calls is not None:
            self.calls += 1
        return (loss, outputs) if return_outputs else loss


def own_loss(name: str, planner: str, **changed) -> None:
    args = arguments(
        name, gradient_accumulation_steps=2, eval_strategy="epoch", num_train_epochs=3, **changed
    )
    data = dict(train_dataset=labelled(10), eval_dataset=labelled(7))
    trainer = trainer_with(planner, Weighted)(classifier(), args, **data)
    trainer.teacher = classifier(seed=1)
    trainer.train()
    done(name, trainer)


class Scaled(BertForSequenceClassification):
    """Reads a number of its own, and one of its configuration."""

    scale = 1.0

    def forward(self, input_ids=None, labels=None, **others):
        out = super().forward(input_ids=input_ids, labels=labels, **others)
        out.loss = out.loss * self.scale * self.config.strength
        return out


class Changes(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            model.scale = 0.5
        elif state.global_step == 2:
            model.config.strength = 3.0


class Penalised(Trainer):
    """Its loss reads a number of the Trainer, and one that its arguments get later."""

    strength = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * self.strength * getattr(self.args, "factor", 1.0)


class Watching(TrainerCallback):
    """Logs norms of the weights and of their gradients, unfreezes a layer, keeps an average, writes the whole
    model, and changes numbers that the loss reads."""

    def __init__(self, trainer) -> None:
        self.trainer, self.average = trainer, {}

    def on_train_begin(self, args, state, control, model=None, **_):
        model.classifier.requires_grad_(False)
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        state.log_history.append({"gradients": float(sum(norms)), "step": state.global_step})

    def on_step_end(self, args, state, control, model=None, **_):
        for name, p in model.named_parameters():
            self.average[name].lerp_(p.detach(), 0.1)
        average = float(sum(x.norm() for x in self.average.values()))
        state.log_history.append({"average": average, "step": state.global_step})
        model.classifier.requires_grad_(state.global_step >= 1)
        if state.global_step == 1:
            self.trainer.strength = 0.5
        elif state.global_step == 2:
            args.factor = 3.0

    def on_save(self, args, state, control, model=None, **_):
        with mixmesh.whole(model) as whole:
            total = float(sum(p.sum() for p in whole.parameters()))
            row = {
                "total": total,
                "classes": whole(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.numel(),
            }
        state.log_history.append({**row, "step": state.global_step})


def watched(name: str, planner: str) -> None:
    """A callback that reads the model and changes what the loss reads; batches that are a list; a
    ``save_model`` of the script's own that reads what trains."""

    class Listed(Penalised):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(output_dir, _internal_call)
            kept = {name: float(p.sum()) for name, p in self.model.named_parameters() if p.requires_grad}
            self.state.log_history.append({**kept, "step": self.state.global_step})

        def get_train_dataloader(self):
            rows = labelled(9)
            return [self.data_collator(rows[n : n + 3]) for n in range(0, 9, 3)]

    args = arguments(name, max_steps=5, save_strategy="steps", save_steps=2)
    trainer = trainer_with(planner, Listed)(classifier(), args, train_dataset=labelled(9))
    trainer.add_callback(Watching(trainer))
    trainer.train()
    done(name, trainer)


def changing(name: str, planner: str) -> None:
    """Numbers of the model that a callback changes."""
    model = classifier(kind=Scaled)
    model.config.strength = 1.0
    args = arguments(name, max_steps=3)
    trainer = trainer_with(planner)(model, args, train_dataset=labelled(12), callbacks=[Changes()])
    trainer.train()
    done(name, trainer)


class Decides(TrainerCallback):
    """Decides on one rank what all must do: the first or the last, which alone sees a file or the clock."""

    is_first = rank() == 0
    is_last = rank() == int(os.environ.get("WORLD_SIZE", "1")) - 1

    def on_log(self, args, state, control, **_):
        if self.is_first and state.global_step == 2:
            control.should_evaluate = control.should_save = True

    def on_substep_end(self, args, state, control, **_):
        control.should_epoch_stop = self.is_last and state.global_step == 3

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = self.is_last and state.global_step == 5


def deciding(name: str, planner: str) -> None:
    """A callback that evaluates, saves and stops, an epoch and the training, on one rank."""
    args = arguments(name, gradient_accumulation_steps=2, num_train_epochs=9, save_strategy="no")
    data = dict(train_dataset=labelled(12), eval_dataset=labelled(4), callbacks=[Decides()])
    trainer = trainer_with(planner)(classifier(), args, **data)
    trainer.train()
    done(name, trainer)


class Stream(IterableDataset):
    """Samples in an order of the epoch's own, drawn when it is read."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        drawn = torch.Generator().manual_seed(self.epoch)
        for n in torch.randperm(len(self.rows), generator=drawn):
            yield self.rows[n]


def streamed(name: str, planner: str, resumed_at: str | None = None) -> None:
    """Data without indices, to train and to evaluate on, over several epochs."""
    args = arguments(name, max_steps=9, eval_strategy="steps", eval_steps=3, save_steps=3)
    data = dict(
        train_dataset=Stream(labelled(14)), eval_dataset={"one": Stream(labelled(5)), "other": labelled(4)}
    )
    trainer = trainer_with(planner)(classifier(), args, **data)
    trainer.train(resume_from_checkpoint=resumed_at)
    done(name, trainer)


def noisy(name: str, planner: str) -> None:
    """Nothing is learnt from the same samples at every step, with noise on what goes into the model."""
    args = arguments(name, max_steps=6, learning_rate=0.0, neftune_noise_alpha=50.0)
    trainer = trainer_with(planner)(language_model(), args, train_dataset=sentences(4))
    trainer.train()
    tell(FOLDER, name, losses=[row["loss"] for row in trainer.state.log_history if "loss" in row])


def noting(name: str, planner: str, kind: type = Weighted) -> None:
    """A loss that is noted in an attribute of the Trainer, or in one of its class: refused."""
    trainer = trainer_with(planner, kind)(classifier(), arguments(name), train_dataset=labelled(4))
    trainer.teacher, trainer.calls = classifier(seed=1), 0
    try:
        trainer.train()
    except TraceError as error:
        tell(FOLDER, name, error=str(error))


class Collecting(Trainer):
    """Collects losses in a list within a dict of the class."""

    seen: dict[str, list] = {"losses": []}  # noqa: RUF012

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.seen["losses"].append(loss.detach())
        return loss


def written(name: str, planner: str) -> None:
    """Sequences that the model writes in evaluation."""
    set_seed(0)
    sizes = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).double()
    written = {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "epoch"}
    args = arguments(name, Seq2SeqTrainingArguments, num_train_epochs=3, **written)
    metrics = {"compute_metrics": lambda predicted: {"mean": float(predicted.predictions.mean())}}
    data = dict(train_dataset=sentences(11), eval_dataset=sentences(5))
    trainer = trainer_with(planner, Seq2SeqTrainer)(model, args, **data, **metrics)
    trainer.train()
    done(name, trainer)


def unlike(name: str, planner: str) -> None:
    """Every rank has samples of its own: refused."""
    data = dict(train_dataset=sentences(8)[rank() :])
    try:
        trainer_with(planner)(language_model(), arguments(name), **data).train()
    except InputError as error:
        tell(FOLDER, name, error=str(error))


def masked(name: str, planner: str, **changed) -> None:
    """Sequences with a padding mask, of which the last batch has one unless it is left out."""
    mask = (torch.arange(8) < 6).long()
    data = [{**row, "attention_mask": mask} for row in sentences(9)]
    args = arguments(name, num_train_epochs=3, **changed)
    trainer = trainer_with(planner)(language_model(), args, train_dataset=data)
    try:
        trainer.train()
    except InputError as error:
        tell(FOLDER, name, error=str(error), steps=trainer.state.global_step)
        return
    done(name, trainer)


def without_bf16(name: str) -> None:
    """A card that would compute in float16, where nothing scales the loss: refused."""
    trainer = trainer_with("ddp-even", cluster=WITHOUT_BF16)
    try:
        trainer(language_model().float(), arguments(name, bf16=True), train_dataset=sentences(8)).train()
    except InputError as error:
        tell(FOLDER, name, error=str(error))


if __name__ == "__main__":  # workers of a loader may import it
    language("cut", "tensor-parallel")
    language("resumed", "ddp-even", str(FOLDER / "cut" / "checkpoint-2"), dataloader_num_workers=1)
    classes("classes", "ddp-proportional")
    short("whole", "ddp-even")
    short("half", "ddp-even", bf16=True)
    short("scaled", "fsdp-even", fp16=True)
    own_loss("own loss", "fsdp-even")
    own_loss("adafactor", "ddp-proportional", optim="adafactor")
    written("written", "ddp-even")
    changing("changing", "ddp-even")
    deciding("deciding", "ddp-proportional")
    noisy("noisy", "fsdp-even")
    streamed("streamed", "fsdp-even")
    streamed("streamed on", "ddp-even", str(FOLDER / "streamed" / "checkpoint-3"))
    masked("masked", "pipeline", dataloader_drop_last=True)
    watched("watched", "tensor-parallel")
    if LIBRARY == "mixmesh.hf":
        noting("noting", "ddp-even")
        noting("collecting", "ddp-even", Collecting)
        masked("smaller last", "pipeline")
        unlike("unlike", "ddp-even")
        without_bf16("without bf16")
