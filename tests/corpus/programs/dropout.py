"""Dropout on a cut value and on a whole one: the numbers are those of the single device."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.m1 = nn.Linear(3, 4)

    def forward(self, x0):
        y = F.dropout(self.m1(x0), 0.5, self.training)
        return F.dropout(y.sin(), 0.3, self.training).square().mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(6, 3, dtype=torch.float64)}


OPTIMIZER = "sgd-momentum"
PLAN = """\
program model world=3 {
  ratio r0 = [0.2, 0, 0.8]
  %x0 = input("x0") : f64[6, 3] S(0)@r0
  %w = param("m1.weight") : f64[4, 3] R@r0
  %b = param("m1.bias") : f64[4] R@r0
  %y = aten.linear(%x0, %w, %b) : f64[6, 4] S(0)@r0
  %d, _ = aten.native_dropout(%y, 0.5, true) : f64[6, 4] S(0)@r0, bool[6, 4] S(0)@r0
  %s = aten.sin(%d) : f64[6, 4] S(0)@r0
  %s.r = all_gather(%s) : f64[6, 4] R
  %e, _ = aten.native_dropout(%s.r, 0.3, true) : f64[6, 4] R, bool[6, 4] R
  %q = aten.square(%e) : f64[6, 4] R
  %m = aten.mean(%q) : f64[] R
  %l = as_partial(%m) : f64[] P(sum)
  return %l
}
"""
