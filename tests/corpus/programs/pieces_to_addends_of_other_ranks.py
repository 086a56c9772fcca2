"""Pieces that become addends held by other ranks: those that leave give theirs to one that stays."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(3, 2)

    def forward(self, x0):
        return self.m1(x0).square().mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(6, 3, dtype=torch.float64)}


OPTIMIZER = "sgd-momentum"
PLAN = """\
program model world=3 {
  ratio r0 = [0.5, 0.5, 0]
  ratio r1 = [0, 0.4, 0.6]
  %x0 = input("x0") : f64[6, 3] S(0)@r0
  %w = param("m1.weight") : f64[2, 3] R@r0
  %b = param("m1.bias") : f64[2] R@r0
  %y = aten.linear(%x0, %w, %b) : f64[6, 2] S(0)@r0
  %s = aten.square(%y) : f64[6, 2] S(0)@r0
  %s.p = move(%s) : f64[6, 2] P(sum)@r1
  %m = aten.mean(%s.p) : f64[] P(sum)@r1
  return %m
}
"""
