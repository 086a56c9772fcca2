"""The job that is disturbed: a small network in double precision whose samples are numbered.

Sums in another order then differ by far less than the errors that the bench looks for: a lost sample, or a
parameter that continued from another step.
"""

from __future__ import annotations

import mmap
import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.faults.journal import drawn
from mixmesh.frontend.job import Job

SAMPLES, BATCH_SIZE, WIDTH = 320, 16, 64
STEPS_PER_EPOCH = SAMPLES // BATCH_SIZE
STEP_VARIABLE = "MIXMESH_FAULTS_STEP_S"  # the least seconds of a step
LOADED_BYTES = 4 * 2**20  # allocated anew for every batch, like a batch of pictures


class Numbered(Dataset):
    """Samples that are drawn by their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return number, x, x.roll(1).tanh()


def collate(samples: list[tuple[int, Tensor, Tensor]]) -> dict[str, Tensor]:
    """A batch; its samples are written down as loaded."""
    numbers, xs, ys = zip(*samples)
    drawn.extend(numbers)
    time.sleep(float(os.environ.get(STEP_VARIABLE, "0")))
    with mmap.mmap(-1, LOADED_BYTES) as memory:
        memory.write(bytes(LOADED_BYTES))
    return {"x": torch.stack(xs), "y": torch.stack(ys)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, 4 * WIDTH, 4 * WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(a, b, dtype=torch.float64) for a, b in zip(sizes, sizes[1:]))
        self.out = nn.Linear(sizes[-1], WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x).tanh()
        return (self.out(x) - y).square().mean()


def job() -> Job:
    torch.manual_seed(0)
    loader = DataLoader(Numbered(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    batch = collate([loader.dataset[n] for n in range(BATCH_SIZE)])
    return Job(Network(), batch, lambda p: torch.optim.AdamW(p, lr=1e-3), loader)
