"""Weight gradients that are computed before their input's, or after the rest of the backward pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from gloo_world import assert_passed, run_world
from programs import make_plan
from torch import nn

from mixmesh.baselines import data_parallel
from mixmesh.buckets import with_buckets
from mixmesh.check import check_program
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.ir import separable, with_wgrads
from mixmesh.plan_file import MicroBatch
from mixmesh.runtime.parallel import parallelize
from mixmesh.trace import trace
from mixmesh.zero import with_stage

WORLD, BATCH, LENGTH, VOCABULARY, WIDTH = 3, 12, 10, 13, 8
CLUSTER = """\
name = "three"
[network]
bandwidth_gbit_per_s = 0.2
latency_us = 20
[[machine]]
devices = [{ cpu_share = 0.6 }]
[[machine]]
devices = [{ cpu_share = 0.3, count = 2 }]
"""
UNEVEN = (0.5, 0.333333, 0.166667)
NOTHING_ON_ONE = (0.666667, 0.333333, 0.0)


class Mixed(nn.Module):
    """Words, convolutions of one and two dims with strides, padding and groups, products with and without a
    bias, and a tied one that is not apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1, groups=2)
        self.square = nn.Conv2d(1, 3, (3, 2), dilation=(2, 1), padding=(2, 0), bias=False)
        self.up = nn.Linear(3 * 4, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        h = self.conv(self.table(ids).transpose(1, 2)).relu()
        h = self.square(h.unsqueeze(1))
        h = self.down(nn.functional.gelu(self.up(h.transpose(1, 2).flatten(2))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def model_of() -> Mixed:
    torch.manual_seed(0)
    return Mixed().double()


def batch(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "ids": torch.randint(VOCABULARY, (BATCH, LENGTH), generator=g),
        "labels": torch.randint(VOCABULARY, (BATCH, 2 * WIDTH), generator=g),
    }


def plain(ratio=UNEVEN):
    graph = trace(model_of(), batch(0)).graph
    return with_buckets(data_parallel(graph, CostModel(Cluster.parse(CLUSTER)), ratio), 600.0)


class PlanOf:
    """A plan, made where it is used: a class, as closures do not pickle. ``marks`` are first, last or
    nothing for each product in turn."""

    def __init__(self, marks, ratio=UNEVEN, stage=0, micro_batches=None) -> None:
        self.marks, self.ratio, self.stage, self.micro_batches = marks, ratio, stage, micro_batches

    def __call__(self):
        program = marked(plain(self.ratio), self.marks)
        if self.stage:
            program = with_stage(program, self.stage, (0.2, 0.0, 0.8))
        check_program(program)
        return make_plan(program, Cluster.parse(CLUSTER), micro_batches=self.micro_batches)


def marked(program, marks):
    able = separable(program)
    return with_wgrads(program, {n: m for n, m in zip(able, itertools.cycle(marks)) if m})


class Training:
    def __init__(self, plan_of) -> None:
        self.plan_of = plan_of

    def __call__(self, _) -> None:
        single, mine = model_of(), model_of()
        optimizer = torch.optim.Adam(single.parameters(), lr=0.05)
        model, sharded = parallelize(
            mine, torch.optim.Adam(mine.parameters(), lr=0.05), self.plan_of(), device="cpu", timeout_s=60
        )
        for step in range(3):
            expected, loss = single(**batch(step)), model(**batch(step))
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
            expected.backward()
            loss.backward()
            for name, p in model.named_parameters():
                held = torch.zeros_like(p) if p.grad is None else p.grad
                whole = model._runtime.by_param[p].whole(held, model.comm)
                torch.testing.assert_close(whole, single.get_parameter(name).grad, rtol=1e-9, atol=1e-9)
            for o in (optimizer, sharded):
                o.step()
                o.zero_grad()
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, single.state_dict()[name], rtol=1e-9, atol=1e-9)


def accumulates(_) -> None:
    """Two backward passes before a step of the optimizer."""
    single, mine = model_of(), model_of()
    model, _ = parallelize(
        mine, torch.optim.SGD(mine.parameters()), PlanOf(("last", "first"))(), device="cpu", timeout_s=60
    )
    for step in range(2):
        single(**batch(step)).backward()
        model(**batch(step)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, single.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


def frozen(_) -> None:
    """A parameter that takes no gradient after planning."""
    single, mine = model_of(), model_of()
    plan = PlanOf(("last",))()
    model, _ = parallelize(mine, torch.optim.SGD(mine.parameters()), plan, device="cpu", timeout_s=60)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(0)), single(**batch(0)), rtol=1e-9, atol=1e-9)


TWO_EACH = (MicroBatch(4, 2, 2), MicroBatch(2, 2, 2), MicroBatch(1, 2, 1))
CHECKS = {
    "first": Training(PlanOf(("first",))),
    "last": Training(PlanOf(("last",))),
    "mixed": Training(PlanOf(("last", None, "first", "last"))),
    "an idle rank": Training(PlanOf(("last", "first"), NOTHING_ON_ONE)),
    "owners of the whole gradient": Training(PlanOf(("last", "first"), stage=1)),
    "owners": Training(PlanOf(("first", "last", "last"), stage=2)),
    "micro-steps": Training(PlanOf(("last", "first"), micro_batches=TWO_EACH)),
    "owners in micro-steps": Training(PlanOf(("last", "first"), stage=2, micro_batches=TWO_EACH)),
    "accumulates": accumulates,
    "without gradients": frozen,
}


@pytest.fixture(scope="module")
def world():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_trains_as_one_device_does(world, name):
    assert_passed(world[name])
