"""A model in channels_last, with a matrix in column order, trains as on one device, whatever optimizer steps
it and however it is cut."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed, run_world
from small_graphs import TWO, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.parallel import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    parallelize,
)
from mixmesh.search.baselines import data_parallel, fully_sharded

PLANS = {
    "data parallel": lambda program: program,
    "fully sharded": fully_sharded,
    "owned": lambda program: with_stage(program, 1, (0.6, 0.4)),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        )
        self.turn = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])  # in column order: its rows are apart

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x).mean((2, 3)) @ self.turn, y)


def model() -> Pictures:
    torch.manual_seed(0)
    return Pictures().double().to(memory_format=torch.channels_last)


def batch(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, 6, 6, generator=g, dtype=torch.float64)
    return {"x": x.to(memory_format=torch.channels_last), "y": torch.arange(8) % 4}


def train(plan: str, optimizer: str) -> None:
    graph = trace(model(), batch(0)).graph
    program = PLANS[plan](data_parallel(graph, CostModel(cluster(TWO)), make_ratio((0.6, 0.4))))
    single, mine = model(), model()
    steps = [OPTIMIZERS[optimizer](m.parameters()) for m in (single, mine)]
    parallel, _ = parallelize(mine, steps[1], program, device="cpu", timeout_s=60)
    for number in range(4):
        for m, step in zip((single, parallel), steps):
            m(**batch(number)).backward()
            step.step()
            step.zero_grad()
        if number == 1:  # a checkpoint's tensors are contiguous
            state = full_optimizer_state_dict(parallel, steps[1])
            for entries in state["state"].values():
                entries.update({k: v.contiguous() for k, v in entries.items() if torch.is_tensor(v)})
            load_full_optimizer_state_dict(parallel, steps[1], copy.deepcopy(state))
    whole = single.state_dict()
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-11, msg=name)


class Check:
    def __init__(self, *of: str) -> None:
        self.of = of

    def __call__(self, _: None) -> None:
        train(*self.of)


@pytest.fixture(scope="module")
def failures():
    return run_world(2, {(p, o): Check(p, o) for p in PLANS for o in OPTIMIZERS})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_as_on_one_device(failures, plan, optimizer):
    assert_passed(failures[plan, optimizer])
