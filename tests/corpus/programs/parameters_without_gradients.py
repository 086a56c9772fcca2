"""Parameters that only a comparison and the shape of a value depend on: no gradient, so no decay either."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(6))
        self.b = nn.Parameter(torch.randn(6))
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x0):
        chosen = (x0 * self.a > 0).to(x0.dtype)
        empty = (x0 + self.b).new_zeros(x0.shape)
        return (x0 * self.w * chosen + empty).square().mean()


def make():
    torch.manual_seed(1)
    return Model().double(), {"x0": torch.randn(8, 6, dtype=torch.float64)}


OPTIMIZER = "adamw"
PLAN = """\
program model world=2 {
  ratio r0 = [0.5, 0.5]
  %x0 = input("x0") : f64[8, 6] S(0)@r0
  %a = param("a") : f64[6] R
  %b = param("b") : f64[6] R
  %w = param("w") : f64[6] R
  %p = aten.mul.Tensor(%x0, %a) : f64[8, 6] S(0)@r0
  %q = aten.gt.Scalar(%p, 0) : bool[8, 6] S(0)@r0
  %c = aten._to_copy(%q, dtype=f64) : f64[8, 6] S(0)@r0
  %n = aten.add.Tensor(%x0, %b) : f64[8, 6] S(0)@r0
  %z = aten.zeros_like(%n) : f64[8, 6] S(0)@r0
  %y = aten.mul.Tensor(%x0, %w) : f64[8, 6] S(0)@r0
  %m = aten.mul.Tensor(%y, %c) : f64[8, 6] S(0)@r0
  %e = aten.add.Tensor(%m, %z) : f64[8, 6] S(0)@r0
  %s = aten.square(%e) : f64[8, 6] S(0)@r0
  %l = aten.mean(%s) : f64[] P(sum)@r0
  return %l
}
"""
