"""Pieces of an input whose one dim is no dim of samples: every plan is whole, no shares can be found."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m2 = nn.Parameter(torch.randn([12, 4]) * 0.5)

    def forward(self, x0):
        pieces = x0.split([6, 10], 0)
        return pieces[1].mean() + 0.1 * self.m2.square().sum()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(16, dtype=torch.float64)}


OPTIMIZER = "adafactor"
PLANNERS = ("heterog", "tag", "placed")
CLUSTER_SEED = 2  # two equal devices
