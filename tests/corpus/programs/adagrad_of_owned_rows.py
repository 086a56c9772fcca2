"""Owned rows that rank 2 has nothing to do with: its piece had another shape than its state."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Linear(6, 8)

    def forward(self, x0):
        return self.m(x0).square().mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(7, 6, dtype=torch.float64)}


OPTIMIZER = "adagrad"
PLAN = """\
program model world=3 {
  ratio r0 = [0.5, 0.5, 0]
  ratio z = [0.5, 0.5, 0]
  %x0 = input("x0") : f64[7, 6] S(0)@r0
  %w = param("m.weight") {owned="z", stage=1, bucket=0} : f64[8, 6] R@r0
  %b = param("m.bias") {owned="z", stage=1, bucket=0} : f64[8] R@r0
  %y = aten.linear(%x0, %w, %b) : f64[7, 8] S(0)@r0
  %s = aten.square(%y) : f64[7, 8] S(0)@r0
  %l = aten.mean(%s) : f64[] P(sum)@r0
  return %l
}
"""
