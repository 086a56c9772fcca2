"""Optimizers whose steps one kernel makes."""

from __future__ import annotations

import pytest
import torch

from mixmesh.frontend.job import optimizer_states
from mixmesh.runtime.optimizers import fuse, step_on_pieces

KINDS = {
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, lr=0.1, **how),
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=0.1, **how),
}


def stepped(kind, how, fused: bool) -> list[torch.Tensor]:
    """Parameters after three steps, one of them a piece without elements."""
    torch.manual_seed(0)
    params = [
        torch.randn(5, 3, dtype=torch.float64, requires_grad=True),
        torch.zeros(0, 3, requires_grad=True),
    ]
    optimizer = KINDS[kind](params, **how)
    assert fuse(optimizer) is fused and bool(optimizer.param_groups[0]["fused"]) is fused
    for _ in range(3):
        params[0].grad = torch.randn_like(params[0])
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_step_is_the_same_step(kind):
    for a, b in zip(stepped(kind, {}, fused=True), stepped(kind, {"foreach": False}, fused=False)):
        assert torch.allclose(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_in_16_bits_are_stepped(kind, dtype):
    """PyTorch's fused SGD on a CPU leaves whole vectors of them as they are."""
    p = torch.ones(64, 3, dtype=dtype, requires_grad=True)
    optimizer = KINDS[kind]([p])
    fuse(optimizer)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p < 0.95).all()


@pytest.mark.parametrize(
    "how", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}], ids=str
)
def test_what_the_user_chose_stays(how):
    optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)], **how)
    before = dict(optimizer.param_groups[0])
    assert not fuse(optimizer) and optimizer.param_groups[0] == before


@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"fused": True}, {"differentiable": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_planning_counts_what_the_run_does(kind, how):
    made = KINDS[kind]([torch.ones(2, requires_grad=True)], **how)
    is_fused = fuse(made) or bool(made.param_groups[0]["fused"])
    states = optimizer_states(lambda params: KINDS[kind](params, **how), torch.nn.Linear(2, 2))
    assert (states.beside == 0) is is_fused is (how in ({}, {"fused": True}))


def test_optimizers_that_stay_as_they_are():
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    warm = torch.optim.AdamW([p])
    warm.step()
    whole = torch.optim.SGD([torch.ones(2, dtype=torch.complex64, requires_grad=True)])

    class Own(torch.optim.SGD):
        pass

    for optimizer in (warm, whole, torch.optim.Adagrad([p]), torch.optim.RMSprop([p]), Own([p])):
        assert not fuse(optimizer) and not optimizer.param_groups[0].get("fused")


class WithoutClosure(torch.optim.Optimizer):
    """As many are written: ``step`` takes no closure."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad / p.grad.norm(), alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_optimizer_whose_step_takes_no_closure(rank):
    """It steps where parameters are whole, and not at all elsewhere."""
    p = torch.ones(4, requires_grad=True)
    optimizer = WithoutClosure([p])
    step_on_pieces(optimizer, (0,), rank)
    p.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), 0.75 if rank == 0 else 1.0))
