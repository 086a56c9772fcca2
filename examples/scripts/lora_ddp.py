"""LoRA on a causal language model with PEFT, under DistributedDataParallel."""

import argparse
import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--samples", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/lora")

VOCABULARY = 256


def make_data(args, seed):
    """Numbers that count upwards, of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (args.samples, 1), generator=generator)
    lengths = torch.randint(args.length // 2, args.length + 1, (args.samples,), generator=generator)
    rows = (starts + torch.arange(args.length)) % VOCABULARY
    return [row[:length] for row, length in zip(rows, lengths.tolist())]


def collate(rows):
    """Pads to the longest row, in steps of 4."""
    length = -(-max(map(len, rows)) // 4) * 4
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.depth,
        num_attention_heads=4,
        max_position_embeddings=args.length,
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    model.print_trainable_parameters()
    data = make_data(args, 1)
    sampler = DistributedSampler(data)
    batch_size = args.batch_size // dist.get_world_size()
    loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=collate)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.epochs * len(loader))
    model = DistributedDataParallel(model)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"epoch {epoch}: loss {loss.item():.12g}")
    os.makedirs(args.out, exist_ok=True)
    model.module.save_pretrained(args.out, is_main_process=dist.get_rank() == 0)


if __name__ == "__main__":
    main(parser.parse_args())
