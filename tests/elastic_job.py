"""A job that notes which samples every step was trained with, and that may meet with faults."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mixmesh
from mixmesh.cluster import detection
from mixmesh.cluster.detection import inventory
from mixmesh.cluster.detection.speed import Speed

FOLDER = Path(os.environ.get("ELASTIC_FOLDER", "."))
SAMPLES, BATCH = 48, 8
STEADY = Speed(4e10, 2e10, 1e10)  # of every device
LITTLE_MEMORY_BYTES = 4096  # in which no plan for the model fits


class Rows(Dataset):
    """Rows whose last column is the sample's own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(float(os.environ.get("ELASTIC_SAMPLE_S", "0")))
        row = torch.randn(5, generator=torch.Generator().manual_seed(index)).double()
        row[-1] = index
        return row


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x):
        return self.two(self.one(x[:, :4])).square().mean()


class Noting(torch.optim.AdamW):
    """Notes the number of the step and the samples of this rank with each step."""

    def step(self, closure=None):
        super().step(closure)
        samples, Loader.given = Loader.given, []
        if not samples:
            return  # a planner tries an optimizer
        take_memory()
        number = int(next(iter(self.state.values()))["step"])
        place = {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"])}
        line = json.dumps({"step": number, "samples": samples, "at": time.time(), **place})
        with open(FOLDER / f"samples-{os.getpid()}", "a") as file:
            file.write(line + "\n")


def take_memory() -> None:
    """Once, on the last of two ranks, asks for more memory than the process may have."""
    limited = FOLDER / "limit-memory"
    if os.environ["RANK"] == "1" and limited.exists():
        limited.unlink()
        held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held_bytes, resource.RLIM_INFINITY))
        torch.ones(2**28)


class Loader(DataLoader):
    """Remembers the samples of the batch that this process was given last: a batch a step."""

    given: list[int] = []


def collate(rows: list[torch.Tensor]) -> tuple[torch.Tensor]:
    Loader.given = [int(row[-1]) for row in rows]  # the first calls are of examples
    return (torch.stack(rows),)


def job() -> mixmesh.Job:
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    process = {"pid": os.getpid(), "rank": int(rank), "world": int(world), "agent": os.getppid()}
    (FOLDER / f"process-{os.getpid()}").write_text(json.dumps(process))
    if (FOLDER / "little-memory").exists():
        inventory.memory_limit = lambda *paths: (LITTLE_MEMORY_BYTES, "a small cgroup")
    if (FOLDER / "steady-speed").exists():  # on a busy machine each start measures another one
        detection.measure_speed = lambda device: STEADY
    torch.manual_seed(5)
    loader = Loader(Rows(), batch_size=BATCH, shuffle=True, collate_fn=collate)
    return mixmesh.Job(Model(), (torch.zeros(BATCH, 5).double(),), data=loader, optimizer=Noting)
