"""Fewer samples than devices: data parallelism leaves devices without any, tensor parallelism needs none."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from gloo_world import assert_passed, assert_trains_alike, run_world
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import support
from mixmesh.measure.verification import verify
from mixmesh.planner import make_plan

THREE = Cluster.parse("""
name = "three unequal devices"
[network]
bandwidth_gbit_per_s = 100
latency_us = 5
[[machine]]
devices = [{ name = "a", tflop_per_s = 0.4, memory_gib = 8, memory_gbyte_per_s = 80 },
           { name = "b", tflop_per_s = 0.3, memory_gib = 8, memory_gbyte_per_s = 60 }]
[[machine]]
devices = [{ name = "c", tflop_per_s = 0.2, memory_gib = 8, memory_gbyte_per_s = 40 }]
""")
PLANNERS = ("auto", "single", "ddp-even", "ddp-tuned", "fsdp-even", "hap", "tensor-parallel", "poplar")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 60), nn.Linear(60, 12)

    def forward(self, x, y):
        return (self.down(nn.functional.gelu(self.up(x))) - y).square().mean()


def model_of() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch_of(samples: int, seed: int = 0) -> dict:
    draw = torch.Generator().manual_seed(seed)
    made = (torch.randn(samples, 5, n, dtype=torch.float64, generator=draw) for n in (24, 12))
    return dict(zip(("x", "y"), made))


def planned(samples: int, planner: str):
    return make_plan(trace(model_of(), batch_of(samples)), THREE, planner=planner)


@pytest.mark.parametrize("samples", (1, 2))
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_is_right(planner, samples):
    model, batch = model_of(), batch_of(samples)
    traced = trace(model, batch)
    plan = make_plan(traced, THREE, planner=planner)
    assert verify(model, batch, plan, traced=traced).ok
    if planner == "ddp-tuned":
        assert len(support(plan.program.ratio_of["r0"])) <= samples


def test_tensor_parallelism_needs_no_samples():
    """All three devices compute on one sample, each a part of the products."""
    plan = planned(1, "tensor-parallel")
    assert support(plan.program.ratio_of["r0"]) == (0, 1, 2)
    assert any(str(i.type.placement).startswith("S") for i in plan.program.params)


def test_what_deals_out_samples_says_that_there_are_too_few():
    with pytest.raises(InputError, match="two-level has no plan"):
        planned(1, "two-level")


@dataclass
class Trains:
    samples: int
    planner: str

    def __call__(self, _) -> None:
        program = planned(self.samples, self.planner).program
        single = model_of()
        batches = [batch_of(self.samples, seed) for seed in range(3)]
        assert_trains_alike(single, copy.deepcopy(single), program, batches)


CHECKS = {
    f"{planner} {samples}": Trains(samples, planner)
    for planner in ("tensor-parallel", "ddp-even", "ddp-tuned", "fsdp-even")
    for samples in (1, 2)
}


@pytest.fixture(scope="module")
def world():
    return run_world(3, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(world, name):
    assert_passed(world[name])
