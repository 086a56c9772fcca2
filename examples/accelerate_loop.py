"""A loop with Accelerate on all devices: ``torchrun --nproc-per-node 2 examples/accelerate_loop.py``

For one device the script is the same, but for the three lines that are marked."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from mixmesh.accelerate import Accelerator  # changed: from accelerate import Accelerator


def points(count, seed):
    """Points in a square, and which of four stripes each is in."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (4 * (x[:, 0] + x[:, 1]) / 2).long())


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        planning={"loss": cross_entropy},  # new: the loss is part of what is planned
    )
    model = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(points(2000, seed=1), batch_size=64, shuffle=True)
    held_out = DataLoader(points(500, seed=2), batch_size=64)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5 * len(loader) // 2)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    for epoch in range(5):
        model.train()
        for x, y in loader:  # whole batches, on every rank
            with accelerator.accumulate(model):
                loss = model(x, y)  # changed: loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for x, y in held_out:
            with torch.no_grad():
                guessed, actual = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            right += (guessed == actual).sum().item()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, {right / len(held_out.dataset):.1%} right")
    accelerator.save_model(model, "out/accelerate")


if __name__ == "__main__":
    main()
