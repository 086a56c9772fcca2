"""A causal language model with the Trainer of Hugging Face, under DistributedDataParallel."""

import argparse
import os

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--samples", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/hf-trainer")

VOCABULARY = 64


class Losses(TrainerCallback):
    """Prints what is logged of the training and of the evaluations."""

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.12g}, norm {logs['grad_norm']:.12g}")
        if "eval_loss" in logs:
            print(f"held out: loss {logs['eval_loss']:.12g}, accuracy {logs['eval_accuracy']:.4f}")


def sentences(args, samples, seed):
    """Numbers that count upwards from a random one: easy to learn."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (samples, 1), generator=generator)
    tokens = (starts + torch.arange(args.length)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def next_tokens(predicted):
    """The share of the tokens that are foretold."""
    guessed, actual = predicted.predictions.argmax(-1)[:, :-1], predicted.label_ids[:, 1:]
    return {"accuracy": float((guessed == actual).mean())}


def main(args):
    set_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.depth,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    options = TrainingArguments(
        args.out,
        per_device_train_batch_size=args.batch_size // int(os.environ["WORLD_SIZE"]),
        ddp_backend="gloo",
        use_cpu=not torch.accelerator.is_available(),  # without it there is no DDP on CPUs
        gradient_accumulation_steps=args.accumulate,
        max_grad_norm=1.0,
        num_train_epochs=args.epochs,
        learning_rate=3e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        options,
        train_dataset=sentences(args, args.samples, 1),
        eval_dataset=sentences(args, args.samples // 8, 2),
        compute_metrics=next_tokens,
        callbacks=[Losses()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()  # AutoModelForCausalLM.from_pretrained(args.out) loads it


if __name__ == "__main__":
    main(parser.parse_args())
