"""A job whose ranks take a time for each sample, the last one much longer from a step on."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mixmesh
from mixmesh.runtime.parallel_model import ParallelModel

SAMPLES, BATCH = 64, 16
ROW_S, SLOWED_AT, FACTOR = 0.001, 5, 40.0


class Rows(Dataset):
    """Rows whose last column is the sample's own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.randn(65, generator=torch.Generator().manual_seed(index)).double()
        row[-1] = index
        return row


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 4)).double()

    def forward(self, x):
        return self.body(x[:, :64]).square().mean()


def model_of(parameter: torch.Tensor) -> ParallelModel | None:
    """The parallel model that has this parameter; None where a planner tries an optimizer."""
    models = (thing for thing in gc.get_objects() if issubclass(type(thing), ParallelModel))
    return next((m for m in models if any(p is parameter for p in m.parameters())), None)


class Slow(torch.optim.AdamW):
    """Takes ``ROW_S`` for each sample of this rank's batch, and notes them."""

    model: ParallelModel | None = None

    def takes_part(self, rank: int) -> bool:
        """Whether a rank has rows of the batch."""
        first = next(i for i in self.model.program.instructions if i.op == "input")
        return rank in self.model.program.participants(first.type)

    def step(self, closure=None):
        super().step(closure)
        samples, Given.samples = Given.samples, []
        if not samples:
            return
        self.model = self.model or model_of(self.param_groups[0]["params"][0])
        if self.model is None or not self.takes_part(int(os.environ["RANK"])):
            return
        step, rank = int(next(iter(self.state.values()))["step"]), os.environ["RANK"]
        with open(Path(os.environ["SLOW_FOLDER"]) / f"samples-{rank}", "a") as file:
            file.write(json.dumps({"step": step, "samples": samples}) + "\n")
        is_slow = rank == "1" and step > SLOWED_AT
        time.sleep(ROW_S * len(samples) * (FACTOR if is_slow else 1.0))


class Given:
    samples: list[int] = []


def collate(rows: list[torch.Tensor]) -> tuple[torch.Tensor]:
    Given.samples = [int(row[-1]) for row in rows]
    return (torch.stack(rows),)


def job() -> mixmesh.Job:
    loader = DataLoader(Rows(), BATCH, collate_fn=collate)
    return mixmesh.Job(
        Model(), (torch.zeros(BATCH, 65).double(),), data=loader, optimizer=lambda p: Slow(p, lr=1e-3)
    )
