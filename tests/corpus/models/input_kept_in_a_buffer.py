"""An input that nothing reads but the update of a buffer: placements of groups did not load it."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b1", torch.zeros([8, 5]))
        self.m3 = nn.Linear(3, 5)

    def forward(self, x0, x1):
        self.b1.copy_(x0)
        return self.m3(x1).square().mean()


def make():
    torch.manual_seed(1)
    double = torch.float64
    return Model().double(), {"x0": torch.randn(8, 5, dtype=double), "x1": torch.randn(8, 3, dtype=double)}


OPTIMIZER = "sgd"
PLANNERS = ("heterog", "placed", "model-parallel")
