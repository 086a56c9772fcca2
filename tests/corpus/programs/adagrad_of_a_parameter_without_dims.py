"""A parameter without dims that rank 0 does not hold: Adagrad's sum, there from the start, was not cut."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Parameter(torch.randn([]))

    def forward(self, x0):
        return (x0 * self.m).square().mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(7, 6, dtype=torch.float64)}


OPTIMIZER = "adagrad"
PLAN = """\
program model world=3 {
  ratio r0 = [0, 0.833333, 0.166667]
  %x0 = input("x0") : f64[7, 6] S(0)@r0
  %m = param("m") : f64[] R@r0
  %y = aten.mul.Tensor(%x0, %m) : f64[7, 6] S(0)@r0
  %s = aten.square(%y) : f64[7, 6] S(0)@r0
  %l = aten.mean(%s) : f64[] P(sum)@r0
  return %l
}
"""
