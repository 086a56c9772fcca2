"""Job files for tests, written where a test wants them."""

from __future__ import annotations

from pathlib import Path

HEAD = """\
import torch
from torch import nn
import mixmesh


class MLP(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), y)


def batch(samples=12):
    return {"x": torch.randn(samples, 8), "y": torch.arange(samples) % 4}

"""

GOOD = (
    HEAD
    + """
def job():
    torch.manual_seed(0)
    return mixmesh.Job(MLP(), batch(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def wide():
    return mixmesh.Job(MLP(64), batch())
"""
)


def write_job(folder: Path, text: str = GOOD, name: str = "job.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def returning(expression: str) -> str:
    """A job file whose ``job`` returns this."""
    return f"{HEAD}\ndef job():\n    return {expression}\n"
