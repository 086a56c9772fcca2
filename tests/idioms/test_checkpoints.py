"""Activation checkpoints that a model asks for are regions of its plan."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from small_graphs import THREE, cluster
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from mixmesh.api import plan_traced
from mixmesh.cost import CostModel
from mixmesh.errors import TraceError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import regions, with_regions
from mixmesh.measure.verification import verify
from mixmesh.simulator import simulate

CLUSTER = cluster(THREE)
HELD = functools.partial(checkpoint, use_reentrant=True)  # as libraries hold it
BATCH = {"x": torch.randn(10, 6, generator=torch.Generator().manual_seed(0)), "y": torch.arange(10) % 4}


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 4)

    def layer(self, h, n):
        return h + F.dropout(self.layers[n](h).relu(), 0.2, self.training)

    def forward(self, x, y):
        h = self.layer(x, 0)
        if self.how == "sequential":
            layers = [functools.partial(self.layer, n=n) for n in (1, 2)]
            h = checkpoint_sequential(layers, 2, h, use_reentrant=False)
        for n in (1, 2) if self.how != "sequential" else ():
            if self.how == "reentrant":
                h = HELD(self.layer, h, n)
            elif self.how == "not reentrant":
                h = checkpoint(self.layer, h, n=n, use_reentrant=False)
            else:
                h = self.layer(h, n)
        return F.cross_entropy(self.last(self.layer(h, 3)), y)


def model(how: str) -> Net:
    torch.manual_seed(0)
    return Net(how)


@pytest.mark.parametrize("planner", ["hap", "ddp-proportional", "fsdp-even"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_they_are_regions_of_the_plan(how, planner):
    traced = trace(model(how), BATCH)
    plan = plan_traced(traced, CLUSTER, planner=planner)
    found = {
        number: {plan.program.instructions[n].op for n in members}
        for number, members in regions(plan.program).items()
    }
    assert found == dict.fromkeys(
        (0, 1), {"aten.linear", "aten.relu", "aten.native_dropout", "aten.add.Tensor"}
    )
    assert verify(model(how), BATCH, plan, traced=traced, steps=2).ok
    # what the plan says of time and memory is that of a program with regions
    costs = CostModel(CLUSTER)
    assert plan.predicted_step_s == pytest.approx(simulate(plan.program, costs).step_s)
    assert plan.predicted_step_s > simulate(with_regions(plan.program, {}), costs).step_s


def test_without_them_there_are_none():
    assert not regions(plan_traced(trace(model("plain"), BATCH), CLUSTER, planner="ddp-even").program)


def test_a_row_of_layers():
    traced = trace(model("sequential"), BATCH)
    assert {n.region for n in traced.graph.nodes} == {None, 0}  # the last segment is never checkpointed
    assert verify(model("sequential"), BATCH, plan_traced(traced, CLUSTER, planner="ddp-even")).ok


class First(nn.Module):
    """A model whose first part is checkpointed, and gets the batch, which needs no gradient."""

    def __init__(self, first: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = first, nn.Linear(6, 4), reentrant

    def forward(self, x, y):
        h = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.last(h), y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_part_whose_inputs_need_no_gradient_learns_nothing():
    torch.manual_seed(0)
    net = First(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), reentrant=True)
    traced = trace(net, BATCH)
    assert any("4 parameters get no gradient" in w for w in traced.warnings)
    assert verify(net, BATCH, plan_traced(traced, CLUSTER, planner="ddp-proportional"), traced=traced).ok


def test_batch_norm_in_a_checkpointed_part():
    """A single device updates its statistics in the forward pass and again when the part runs again."""
    torch.manual_seed(0)
    net = First(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), reentrant=False)
    with pytest.raises(TraceError, match="updates first.1.num_batches_tracked, on one device twice"):
        trace(net, BATCH)
    net.first[1].eval()
    assert verify(net, BATCH, plan_traced(trace(net, BATCH), CLUSTER, planner="ddp-proportional")).ok
    net.first.train().requires_grad_(False)  # nothing runs it again
    assert verify(net, BATCH, plan_traced(trace(net, BATCH), CLUSTER, planner="ddp-proportional")).ok


def test_gradient_checkpointing_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4, n_positions=16,
        bos_token_id=1, eos_token_id=1)  # fmt: skip
    torch.manual_seed(0)
    gpt = transformers.GPT2LMHeadModel(config).train()
    gpt.gradient_checkpointing_enable()
    ids = torch.randint(1, 50, (6, 5), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    traced = trace(gpt, batch)
    plan = plan_traced(traced, CLUSTER, planner="ddp-proportional")
    assert len(regions(plan.program)) == 2
    assert verify(gpt, batch, plan, traced=traced).ok
