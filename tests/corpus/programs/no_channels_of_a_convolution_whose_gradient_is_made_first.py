"""A rank has no output channels of a convolution, whose weight gradient is made apart from its input's."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(6, 6)
        self.m2 = nn.Conv1d(2, 2, 2, bias=False)

    def forward(self, x0):
        return self.m2(self.m1(x0)).square().mean()


def make():
    torch.manual_seed(0)
    return Model().double(), {"x0": torch.randn([5, 2, 6], dtype=torch.float64)}


OPTIMIZER = "sgd"
PLAN = """\
program model world=3 {
  ratio r0 = [0.4, 0.3, 0.3]
  %x0 = input("x0") : f64[5, 2, 6] R@r0
  %m1.weight = param("m1.weight") : f64[6, 6] R@r0
  %m1.bias = param("m1.bias") : f64[6] R@r0
  %linear = aten.linear(%x0, %m1.weight, %m1.bias) : f64[5, 2, 6] R@r0
  %m2.weight = param("m2.weight") : f64[2, 2, 2] S(0)@r0
  %conv1d = aten.conv1d(%linear, %m2.weight) {wgrad="first"} : f64[5, 2, 5] S(1)@r0
  %square = aten.square(%conv1d) : f64[5, 2, 5] S(1)@r0
  %mean = aten.mean(%square) : f64[] P(sum)@r0
  return %mean
}
"""
