"""Optimizers of several kinds: PyTorch's own, plain and fused, and two written as people write them."""

from __future__ import annotations

from functools import partial

import torch
from torch import optim


class Lion(optim.Optimizer):
    """Sign of a momentum (Chen et al., 2023). Signs of rounding noise are zero, so that runs compare."""

    def __init__(self, params, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                update = 0.9 * momentum + 0.1 * p.grad
                sign = torch.where(update.abs() > 1e-7, update.sign(), 0.0)
                p.add_(sign + 0.1 * p, alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


# Adam's epsilon is large, so that gradients that are rounding noise around zero do not become whole steps
OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd-momentum": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-fused": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adamw": partial(optim.AdamW, lr=0.01, eps=1e-3),
    "adamw-fused": partial(optim.AdamW, lr=0.01, eps=1e-3, fused=True),
    "adam-foreach": partial(optim.Adam, lr=0.01, eps=1e-3, foreach=True),
    "rmsprop": partial(optim.RMSprop, lr=0.01, eps=1e-2, momentum=0.5),
    "adagrad": partial(optim.Adagrad, lr=0.05, eps=1e-3),
    "adafactor": partial(optim.Adafactor, lr=0.01, eps=(1e-6, 1e-2)),
    "lion": partial(Lion, lr=0.003),
}
