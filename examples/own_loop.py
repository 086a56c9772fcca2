"""A loop of one's own that survives: ``torchrun --nproc-per-node 2 examples/own_loop.py [FOLDER]``

Stopped in any way, by SIGTERM or Ctrl-C too, the same command goes on where it was, on other devices as well,
and so does ``python examples/own_loop.py [FOLDER]`` on one. The lines for that are marked."""

import os
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mixmesh
from mixmesh import checkpoint

EPOCHS = 5


def points(count):
    """Points in a square, and which of four stripes each is in."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (4 * (x[:, 0] + x[:, 1]) / 2).long())


def main(folder="out/own-loop"):
    torch.manual_seed(0)
    layers = nn.Linear(2, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(points(2000), batch_size=64, shuffle=True)
    model, optimizer, loader = mixmesh.prepare(model, optimizer, loader, loss=cross_entropy)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))

    loader = checkpoint.resumable(loader)  # survives: on one device a plain DataLoader cannot go on
    parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)  # survives
    step = found.step if (found := checkpoint.load(folder, **parts)) else 0  # survives
    with checkpoint.Preemption(model) as preemption:  # survives
        for epoch in range(loader.state_dict()["epoch"], EPOCHS):  # survives: was range(EPOCHS)
            for x, y in loader:
                loss = model(x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1  # survives
                if os.environ.get("RANK", "0") == "0" and step % 5 == 0:
                    print(f"epoch {epoch}, step {step}: loss {loss.item()}", flush=True)
                if preemption.is_requested() or step % 20 == 0:  # survives
                    checkpoint.save(folder, step=step, keep=3, **parts)  # survives
                if preemption.status:  # survives
                    sys.exit(preemption.status)  # survives


if __name__ == "__main__":
    main(*sys.argv[1:])
