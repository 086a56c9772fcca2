"""The Hugging Face Trainer on all devices: ``torchrun --nproc-per-node 2 examples/hf_trainer.py``

For one device the script is the same, but for the line that is marked."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from mixmesh.hf import Trainer  # the changed line: from transformers import Trainer

SAMPLES, LENGTH = 500, 32


def sentences(seed):
    """Numbers that count upwards from a random one: easy to learn."""
    starts = torch.randint(64, (SAMPLES, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (starts + torch.arange(LENGTH)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def next_tokens(predicted):
    """How many tokens are foretold."""
    guessed, actual = predicted.predictions.argmax(-1)[:, :-1], predicted.label_ids[:, 1:]
    return {"accuracy": float((guessed == actual).mean())}


def main():
    set_seed(0)
    sizes = dict(vocab_size=64, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        "out/hf-trainer",
        per_device_train_batch_size=16,  # of all devices together
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        num_train_epochs=3,
        learning_rate=3e-3,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
    )
    data = dict(train_dataset=sentences(1), eval_dataset=sentences(2)[:50])
    trainer = Trainer(model, args, **data, compute_metrics=next_tokens)
    trainer.train()
    trainer.save_model()  # AutoModelForCausalLM.from_pretrained("out/hf-trainer") loads it


if __name__ == "__main__":
    main()
