"""A loop with Accelerate, under DistributedDataParallel."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/accelerate")


def points(count, seed):
    """Points in a square, and which of four stripes each is in."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (4 * (x[:, 0] + x[:, 1]) / 2).long())


def main(args):
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    on_cpu = not torch.accelerator.is_available()  # without it there is no DDP on CPUs
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=args.accumulate)
    width = args.width
    layers = nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch_size = args.batch_size // accelerator.num_processes
    loader = DataLoader(points(args.samples, seed=1), batch_size, shuffle=True)
    held_out = DataLoader(points(args.samples // 4, seed=2), args.batch_size)
    updates = -(-len(loader) // args.accumulate) * args.epochs
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    for epoch in range(args.epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            print(f"epoch {epoch}: loss {loss.item():.12g}, rate {scheduler.get_last_lr()[0]:.12g}")
        model.eval()
        right = 0
        for x, y in held_out:
            with torch.no_grad():
                guessed, actual = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            right += (guessed == actual).sum().item()
        print(f"epoch {epoch}: accuracy {right / len(held_out.dataset):.4f}")
    accelerator.save_model(model, args.out)


if __name__ == "__main__":
    main(parser.parse_args())
