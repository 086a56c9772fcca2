"""Two parameters in one piece each, gathered and added: autograd hands both the same tensor as gradient, and
each is used a second time."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4))
        self.b = nn.Parameter(torch.randn(4))

    def forward(self, x0):
        return ((self.a + self.b) * x0).sin().mean() + (self.a * self.b).mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(6, 4, dtype=torch.float64)}


OPTIMIZER = "sgd-momentum"
PLAN = """\
program model world=2 {
  ratio r0 = [0, 1]
  %x0 = input("x0") : f64[6, 4] R@r0
  %a = param("a") : f64[4] S(0)@r0
  %b = param("b") : f64[4] S(0)@r0
  %a.s = all_gather(%a) : f64[4] R@r0
  %b.s = all_gather(%b) : f64[4] R@r0
  %p = aten.mul.Tensor(%a.s, %b.s) : f64[4] R@r0
  %q = aten.mean(%p) : f64[] R@r0
  %a.r = all_gather(%a) : f64[4] R@r0
  %b.r = all_gather(%b) : f64[4] R@r0
  %y = aten.add.Tensor(%a.r, %b.r) : f64[4] R@r0
  %z = aten.mul.Tensor(%y, %x0) : f64[6, 4] R@r0
  %s = aten.sin(%z) : f64[6, 4] R@r0
  %m = aten.mean(%s) : f64[] R@r0
  %t = aten.add.Tensor(%m, %q) : f64[] R@r0
  %l = as_partial(%t) : f64[] P(sum)@r0
  return %l
}
"""
