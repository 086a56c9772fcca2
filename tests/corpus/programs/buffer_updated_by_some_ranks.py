"""A buffer that nobody reads, updated by a rank that is not the first: a full state has its new value."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(3, 2)
        self.register_buffer("b1", torch.zeros([6, 2]))

    def forward(self, x0):
        y = self.m1(x0)
        self.b1.copy_(y.detach())
        return y.square().mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(6, 3, dtype=torch.float64)}


OPTIMIZER = "sgd"
PLAN = """\
program model world=3 {
  ratio r0 = [0, 0.4, 0.6]
  %x0 = input("x0") : f64[6, 3] S(0)@r0
  %w = param("m1.weight") : f64[2, 3] R@r0
  %b = param("m1.bias") : f64[2] R@r0
  %y = aten.linear(%x0, %w, %b) : f64[6, 2] S(0)@r0
  %d = aten.detach(%y) : f64[6, 2] S(0)@r0
  %d.r = all_gather(%d) : f64[6, 2] R@r0
  update("b1", %d.r)
  %s = aten.square(%y) : f64[6, 2] S(0)@r0
  %m = aten.mean(%s) : f64[] P(sum)@r0
  return %m
}
"""
