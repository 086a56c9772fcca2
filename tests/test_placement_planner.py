"""Planners of op groups: model parallelism where nothing else fits, a ratio per segment where it pays, and a
local search that finds what enumeration finds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import support
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure.verification import verify
from mixmesh.passes.zero import with_stage
from mixmesh.planner.hap import synthesised
from mixmesh.planner.placed import cuts, local_search, uniform
from mixmesh.planner.segments import balanced, segments
from mixmesh.planner.spaces import space_of
from mixmesh.planner.task import Task
from mixmesh.search.evaluate import Evaluator
from mixmesh.search.placement import Space, make_grouping

# one computes fast, the other reads memory fast
UNLIKE = """
name = "unlike"
[[machine]]
devices = [
  { name = "products", tflop_per_s = 0.2, memory_gib = 8, memory_gbyte_per_s = 4 },
  { name = "streams", tflop_per_s = 0.02, memory_gib = 8, memory_gbyte_per_s = 40 },
]
link_gbit_per_s = 400
link_latency_us = 1
"""
SMALL = """
name = "small"
[network]
bandwidth_gbit_per_s = 10
latency_us = 10
[[machine]]
devices = [{{ name = "one", tflop_per_s = 1, memory_gib = {0}, memory_gbyte_per_s = 100, count = 2 }}]
[[machine]]
devices = [{{ name = "two", tflop_per_s = 0.5, memory_gib = {0}, memory_gbyte_per_s = 50 }}]
"""


class Halves(nn.Module):
    """Products first, then a long way through memory."""

    def __init__(self, width: int = 256, depth: int = 12) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.depth = depth

    def forward(self, x):
        for layer in self.products:
            x = layer(x)
        for _ in range(self.depth):
            x = (x * 1.01).tanh()
        return x.square().mean()


def task_of(model: nn.Module, batch: dict, cluster: Cluster) -> Task:
    return Task(trace(model, batch).graph, CostModel(cluster), ADAM, lambda _: None)


def layers(count: int, width: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    return Scored(model)


class Scored(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


def test_a_ratio_per_segment_pays_where_devices_differ_in_kind():
    batch = {"x": torch.randn(64, 256)}
    model = Halves()
    graph = trace(model, batch)
    plan = plan_traced(graph, Cluster.parse(UNLIKE), planner="segments")
    whole = plan_traced(graph, Cluster.parse(UNLIKE), planner="ddp-proportional")
    assert plan.predicted_step_s < 0.9 * whole.predicted_step_s
    assert len({ratio for _, ratio in plan.program.ratios}) > 1
    assert verify(model, batch, plan, traced=graph).ok


def test_segments_are_kept_where_they_pay():
    task = task_of(layers(4, 128), {"x": torch.randn(64, 128)}, Cluster.parse(UNLIKE))
    found = list(segments(task))
    assert min(p.key for p in found) <= min(p.key for p in synthesised(task))
    assert all(len(set(dict(p.program.ratios).values())) <= 4 for p in found)


def test_segments_of_a_program_whose_gradients_have_owners():
    """As hap's may have: their ratio is none of the segments'."""
    task = task_of(layers(4, 128), {"x": torch.randn(64, 128)}, Cluster.parse(UNLIKE))
    found = min(synthesised(task), key=lambda p: p.key)
    owned = with_stage(found.program, 1, (0.5, 0.5))
    task.proposed["hap"] = task.judge("hap", owned)
    first, *others = segments(task)
    assert first.program == task.proposed["hap"].program and others
    assert not any(i.attr("owned") for p in others for i in p.program.params)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.01, 10)), min_size=1, max_size=6))
def test_balanced_shares_end_together(lines):
    fixed, slope = np.array(lines).T
    ratio, least = balanced(fixed, slope)
    ends = fixed + slope * np.array(ratio)
    taking = list(support(ratio))
    rounded = 1e-6 * slope * len(lines)  # shares have six digits
    assert (abs(ends - least)[taking] <= rounded[taking] + 1e-12).all()
    # who has no share would end later with any
    assert all(fixed[j] >= least - rounded[j] for j in range(len(lines)) if j not in taking)


def test_model_parallelism_where_data_parallelism_does_not_fit():
    """Parameters, gradients and optimizer state of 4 layers are 0.25 GiB each, beside 1.34 of the process."""
    model = layers(12, 2048)
    batch = {"x": torch.randn(8, 2048)}
    graph = trace(model, batch)
    cluster = Cluster.parse(SMALL.format(2.1))
    assert not plan_traced(graph, Cluster.parse(SMALL.format(4)), planner="ddp-even").warnings
    plan = plan_traced(graph, cluster, planner="model-parallel")
    assert plan.feasible and plan.predicted_peak_memory_bytes[0] < 2.1 * 2**30
    everywhere = {plan.program.participants(p.type) for p in plan.program.params}
    assert len(everywhere) > 1 and (0, 1, 2) not in everywhere
    small = layers(12, 16)
    inputs = {"x": torch.randn(8, 16)}
    same = plan_traced(trace(small, inputs), cluster, planner="model-parallel")
    assert verify(small, inputs, same).ok


def test_local_search_finds_what_enumeration_finds():
    task = task_of(layers(3, 64), {"x": torch.randn(32, 64)}, Cluster.parse(SMALL.format(4)))
    base = space_of(task).program
    space = Space(base, task.costs, make_grouping(task.graph, task.costs, 3))
    found = local_search(task, space, max_evaluations=1500)
    every = Evaluator(space, found.judge)
    choices = [[a.placed for a in space.actions(k)] for k in range(len(space.groups))]
    assert 100 < np.prod([len(c) for c in choices]) < 20_000
    least = min(every(strategy).penalised for strategy in product(*choices))
    (best,) = found.least_penalised(1)
    assert found(best).penalised <= least  # it may also move single samples
    assert found(best).penalised <= min(found(s).penalised for s in (*cuts(space, task), *uniform(space)))


@pytest.mark.parametrize("planner", ["model-parallel", "segments", "placed"])
def test_one_device_alone(planner):
    model, batch = layers(2, 16), {"x": torch.randn(8, 16)}
    plan = plan_traced(
        trace(model, batch),
        Cluster.parse('name = "one"\n[[machine]]\ndevices = ["T4-16GB"]\n'),
        planner=planner,
    )
    assert plan.feasible and verify(model, batch, plan).ok
