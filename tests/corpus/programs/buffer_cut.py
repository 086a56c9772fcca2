"""A buffer that is held in pieces and updated with a whole value."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(3, 5)
        self.register_buffer("b1", torch.ones([5]))

    def forward(self, x0):
        y = self.m1(x0) * self.b1.clone()
        self.b1.mul_(0.9).add_(y.detach().mean(0))
        return y.square().mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(6, 3, dtype=torch.float64)}


OPTIMIZER = "sgd"
PLAN = """\
program model world=3 {
  ratio r0 = [0.2, 0.4, 0.4]
  ratio r1 = [0, 0.5, 0.5]
  %x0 = input("x0") : f64[6, 3] R
  %w = param("m1.weight") : f64[5, 3] S(0)@r0
  %b = param("m1.bias") : f64[5] S(0)@r0
  %h = aten.linear(%x0, %w, %b) : f64[6, 5] S(1)@r0
  %k = buffer("b1") : f64[5] S(0)@r0
  %y = aten.mul.Tensor(%h, %k) : f64[6, 5] S(1)@r0
  %n = aten.mul.Tensor(%k, 0.9) : f64[5] S(0)@r0
  %d = aten.detach(%y) : f64[6, 5] S(1)@r0
  %e = aten.mean.dim(%d, [0]) : f64[5] S(0)@r0
  %f = aten.add.Tensor(%n, %e) : f64[5] S(0)@r0
  %f.r = all_gather(%f) : f64[5] R
  update("b1", %f.r)
  %s = aten.square(%y) : f64[6, 5] S(1)@r0
  %m = aten.mean(%s) : f64[] P(sum)@r0
  return %m
}
"""
