"""Models made on the device ``meta``: planned as those with values, and refused where values are needed."""

from __future__ import annotations

import pytest
import torch
from plans import THREE
from torch import nn

import mixmesh
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, TraceError
from mixmesh.frontend.trace import trace
from mixmesh.measure.verification import verify


class Constants(nn.Module):
    """Has a buffer of constants, a norm, tied weights, a constant of the device, and a check of values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))

    def forward(self, x):
        if x.min() < -100:
            raise ValueError("not these")
        y = self.second(self.norm(self.first(x)).relu()) * self.scale
        return (y * torch.tensor([0.5], device=y.device) + torch.tensor(2.0)).square().mean()


class Kept(Constants):
    """Keeps a tensor that is no buffer, whose values a model on ``meta`` has lost."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.tensor([3.0])

    def forward(self, x):
        return super().forward(x) * self.kept.sum()


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_values_is_the_same_graph(device):
    model, expected = on_meta(Constants), trace(Constants(), {"x": torch.ones(12, 6)}).graph
    given = trace(model, {"x": torch.ones(12, 6, device=device)}).graph
    assert given.fingerprint == expected.fingerprint
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))  # as they were
    assert model.second.weight is model.first.weight


def test_a_batch_without_values_is_the_same_graph():
    expected = trace(Constants(), {"x": torch.ones(12, 6)}).graph
    assert trace(Constants(), {"x": torch.ones(12, 6, device="meta")}).graph == expected


def test_models_of_transformers_are_planned_without_values():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    config = transformers.OPTConfig(
        ffn_dim=32, word_embed_proj_dim=16, bos_token_id=0, eos_token_id=0, **sizes
    )
    tokens = torch.zeros(12, 10, dtype=torch.int64)
    model = on_meta(lambda: transformers.OPTForCausalLM(config))
    plan = mixmesh.plan(model, {"input_ids": tokens, "labels": tokens}, Cluster.parse(THREE))
    assert plan.feasible
    whole = transformers.OPTForCausalLM(config)
    graph = trace(whole, {"input_ids": tokens, "labels": tokens}).graph
    assert graph.fingerprint == plan.graph_fingerprint  # the plan is of the model with values


def test_a_tensor_that_has_lost_its_values_is_refused_by_name():
    for device in ("cpu", "meta"):
        with pytest.raises(TraceError, match="kept|lifted") as caught:
            trace(on_meta(Kept), {"x": torch.ones(12, 6, device=device)})
        assert "register_buffer" in str(caught.value), caught.value


def test_training_without_values_is_refused():
    batch = {"x": torch.randn(12, 6)}
    one = mixmesh.plan(Constants(), batch, Cluster.parse("[[machine]]\ndevices = [{ cpu_share = 1.0 }]"))
    model, _ = mixmesh.parallelize(on_meta(Constants), None, one)
    with pytest.raises(InputError, match="the model has no values") as caught:
        model(**batch)
    assert "mixmesh run --weights FROM" in str(caught.value)
    model.load_full_state_dict(expected := Constants().state_dict())
    assert all(value.equal(expected[name]) for name, value in model.full_state_dict().items())
    given = Constants()
    given.load_state_dict(expected)
    assert model(**batch).allclose(given(**batch))
    lost = on_meta(Constants)
    lost.register_buffer("scale", lost.scale, persistent=False)
    with pytest.raises(InputError, match="a buffer has no values, and is not in the model's state_dict"):
        mixmesh.parallelize(lost, None, one)
    plan = mixmesh.plan(Constants(), batch, Cluster.parse(THREE))
    with pytest.raises(InputError, match="the model has no values"):
        verify(on_meta(Constants), {"x": torch.ones(12, 6)}, plan)
    with pytest.raises(InputError, match="the batch has no values"):
        verify(Constants(), {"x": torch.ones(12, 6, device="meta")}, plan)
