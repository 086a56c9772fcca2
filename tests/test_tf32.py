"""TF32 of matrix products: read from the job, recorded in plans, warned about where it is missed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from small_graphs import GRAPHS, THREE, cluster, graph
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Profile
from mixmesh.cost.tf32 import SETTING, tf32_warnings
from mixmesh.errors import PlanError
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.planner.make import make_plan

MLP = graph(GRAPHS["mlp"], 64)
HALF_MLP = graph(GRAPHS["mlp"], 64, dtype="bf16")


def cards(name: str) -> Cluster:
    return Cluster.parse(f'[[machine]]\ndevices = [{{ device = "{name}", count = 2 }}]\n')


@contextmanager
def allowed(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(256, 256)

    def forward(self, x):
        return self.fc(x).square().mean()


@pytest.mark.parametrize("on", [False, True])
def test_a_plan_has_what_the_job_had_when_it_was_traced(on):
    with allowed(on):
        traced = trace(Loss(), {"x": torch.zeros(64, 256)})
    assert traced.tf32 is on
    plan = make_plan(traced, cards("A100-40GB"), planner="ddp-even")
    assert plan.tf32 is on and ("tf32 = true" in str(plan)) is on
    assert Plan.parse(str(plan)) == plan
    assert any(SETTING in warning for warning in plan.warnings) is not on


def test_a_header_says_true_or_false():
    plan = make_plan(MLP, cards("A100-40GB"), planner="ddp-even", tf32=True)
    with pytest.raises(PlanError, match="tf32"):
        Plan.parse(str(plan).replace("tf32 = true", 'tf32 = "yes"'))


def test_steps_are_shorter_where_the_card_has_it():
    large = graph(GRAPHS["mlp"], 1024)

    def plan(name: str, tf32: bool) -> Plan:
        return make_plan(large, cards(name), planner="ddp-even", tf32=tf32)

    off, on = (plan("A100-40GB", tf32) for tf32 in (False, True))
    assert on.predicted_step_s < off.predicted_step_s and on.bound_s < off.bound_s
    assert plan("V100-16GB", True).predicted_step_s == plan("V100-16GB", False).predicted_step_s


@pytest.mark.parametrize(
    ("name", "program", "on", "warned"),
    [
        ("A100-40GB", MLP, False, True),
        ("A100-40GB", MLP, True, False),
        ("A100-40GB", HALF_MLP, False, False),  # nothing that it would change
        ("V100-16GB", MLP, False, False),  # has none
        ("RTX3090-24GB", MLP, False, False),  # has no more of it than of plain float32
    ],
)
def test_what_is_missed_is_warned_about(name, program, on, warned):
    warnings = tf32_warnings(CostModel(cards(name), tf32=on), program)
    assert bool(warnings) is warned
    if warned:
        assert name in warnings[0] and SETTING in warnings[0]


def test_a_profile_of_the_other_setting_is_warned_about():
    profile = Profile({}, (), {"tf32": "on"})
    assert tf32_warnings(CostModel(cards("V100-16GB"), profile, tf32=True), MLP) == ()
    (warning,) = tf32_warnings(CostModel(cards("V100-16GB"), profile), MLP)
    assert "profile it again" in warning
    unknown = replace(profile, provenance={})  # of an earlier version, or of CPUs
    assert tf32_warnings(CostModel(cards("V100-16GB"), unknown), MLP) == ()


def test_plans_of_cpus_say_nothing_of_it():
    plan = make_plan(
        MLP, cluster(THREE.replace("memory_gib", 'kind = "cpu", memory_gib')), planner="ddp-even"
    )
    assert "tf32" not in str(plan).lower()
