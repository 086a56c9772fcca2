"""Attention of ``torch.nn`` projects its output as rows of a matrix: ranks compute those of their samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_graphs import TWO, cluster
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.frontend.trace import trace
from mixmesh.measure.verification import verify

BATCH = {"x": torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))}


class Model(nn.Module):
    def __init__(self, body, module: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner, self.last = module, nn.Linear(8, 3)
        self.body = body

    def forward(self, x):
        return self.last(self.body(self.inner, x)).square().mean()


def attention(**options) -> nn.Module:
    return nn.MultiheadAttention(8, 2, **options)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


MODELS = {
    "an encoder": lambda: Model(lambda m, x: m(x), encoder()),
    "weights, samples second": lambda: Model(
        lambda m, x: m(x.transpose(0, 1), *[x.transpose(0, 1)] * 2)[0].transpose(0, 1), attention()
    ),
    "weights of every head": lambda: Model(
        lambda m, x: m(x[:, :2], x, x, average_attn_weights=False)[0], attention(batch_first=True)
    ),
    "by hand": lambda: Model(lambda m, x: m(x.mT.reshape(-1, 5)).view(6, 8, 8).mT, nn.Linear(5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_several_dims_are_cut_between_samples(name):
    model = MODELS[name]()
    traced = trace(model, BATCH)
    plan = plan_traced(traced, cluster(TWO), planner="ddp-proportional")
    assert not plan.warnings
    assert not [i for i in plan.program.instructions if i.op == "all_gather"]
    report = verify(model, BATCH, plan, traced=traced)
    assert report.ok, str(report)


def both_uses(m, x):
    rows = m(x.reshape(-1, 8))
    return rows.view(6, 5, 8) * F.softmax(rows, 0).view(6, 5, 8)


@pytest.mark.parametrize("body", [both_uses, lambda m, x: m(x.reshape(-1, 8)).view(-1, 4).view(6, 5, 8)])
def test_rows_that_are_used_otherwise_stay(body):
    model = Model(body, nn.Linear(8, 8))
    graph = trace(model, BATCH).graph
    assert len([n for n in graph.nodes if n.op == "aten.linear" and len(n.types[0].shape) == 2]) == 1
