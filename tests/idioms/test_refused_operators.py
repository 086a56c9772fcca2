"""Operators that no program can hold: refused when the model is planned, with the line and a way out."""

from __future__ import annotations

import pytest
import torch
from graph_eval import evaluate
from torch import distributed as dist
from torch import nn
from torch.distributed import nn as between_ranks
from torch.nn.utils import rnn

from mixmesh.errors import TraceError
from mixmesh.frontend.trace import trace


class Clip(torch.autograd.Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)


class CustomFunction(Model):
    line, hint = "Clip.apply", "x + (f(x) - x).detach()"

    def forward(self, x):
        return Clip.apply(self.layer(x)).square().mean()


class ByMask(Model):
    line, hint = "rows @ rows.T", "torch.where or a multiplication by the mask"

    def forward(self, x):
        rows = self.layer(x)[x[:, 0] > 0]
        return (rows @ rows.T).mean()


class ByNonzero(Model):
    line, hint = "torch.zeros(len(x), 8).index_add(", "torch.where or a multiplication by the mask"

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return torch.zeros(len(x), 8).index_add(0, rows.flip(0), self.layer(x)[rows]).square().mean()


class Packed(Model):
    line, hint = "rnn.pad_packed_sequence", "padded ones with a mask"

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x):
        lengths = torch.arange(len(x), 0, -1)
        packed = rnn.pack_padded_sequence(x[:, None].expand(-1, len(x), -1), lengths, batch_first=True)
        padded, _ = rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return padded.square().mean()


class FunctionalForces(Model):
    """Its loss has a gradient in it."""

    line, hint = "torch.func.grad", "torch.autograd.grad(y.sum(), x, create_graph=True)"

    def forward(self, x):
        return torch.func.grad(lambda row: self.layer(row).tanh().sum())(x).square().mean()


@pytest.mark.parametrize("kind", [CustomFunction, ByMask, ByNonzero, Packed, FunctionalForces])
def test_refused_with_the_line(kind):
    kind()(torch.randn(6, 4)).backward()  # it trains on one device
    with pytest.raises(TraceError) as caught:
        trace(kind(), {"x": torch.randn(6, 4)})
    assert kind.line in caught.value.where and "test_refused_operators.py:" in caught.value.where
    assert any(kind.hint in hint for hint in caught.value.hint), caught.value


class Gathers(Model):
    """Compares the samples of all ranks, as contrastive models written for DistributedDataParallel do."""

    line = "dist.all_gather"

    def forward(self, x):
        y = self.layer(x)
        if dist.is_initialized():
            everyone = [torch.zeros_like(y)]
            dist.all_gather(everyone, y.contiguous())
            everyone[dist.get_rank()] = y
            y = torch.cat(everyone * 2)
        return (y @ y.T).mean()


class GathersWithGradient(Model):
    line = "between_ranks.all_gather"

    def forward(self, x):
        y = torch.cat(between_ranks.all_gather(self.layer(x)))
        return (y @ y.T).mean()


class Sums(Model):
    line = "dist.all_reduce"

    def forward(self, x):
        y = self.layer(x)
        mean = y.detach().clone()
        dist.all_reduce(mean)
        return (y - mean).square().mean()


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Gathers, GathersWithGradient, Sums])
def test_messages_between_ranks_are_refused_with_the_line(alone, kind):
    with pytest.raises(TraceError) as caught:
        trace(kind(), {"x": torch.randn(6, 4)})
    assert kind.line in caught.value.where and "test_refused_operators.py:" in caught.value.where
    assert "the batch is whole here" in caught.value.hint[0], caught.value


@torch.library.custom_op("idioms::round", mutates_args=())
def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.round()


rounded.register_fake(torch.empty_like)
rounded.register_autograd(lambda ctx, gradient: gradient)


class CustomOperator(Model):
    def forward(self, x):
        return rounded(self.layer(x)).square().mean()


def test_an_operator_of_ones_own_is_kept():
    """It runs whole on every device, with a warning (``unsupported_ops``)."""
    assert "idioms.round" in [n.op for n in trace(CustomOperator(), {"x": torch.randn(6, 4)}).graph.nodes]


class SparseLookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, ids):
        return self.table(ids).square().mean()


def test_sparse_gradients_become_dense():
    """Ranks can sum these; their values are the same."""
    graph = trace(SparseLookups(), {"ids": torch.zeros(6, 3, dtype=torch.long)}).graph
    (lookup,) = [n for n in graph.nodes if n.op == "aten.embedding"]
    assert True not in lookup.args[2:]


class SparseBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4, mode="sum", sparse=True)

    def forward(self, ids, offsets):
        return self.table(ids, offsets).square().mean()


def test_sparse_gradients_of_bags_become_dense():
    """As in DLRM (Naumov et al., 2019), whose bags have lengths of their own."""
    torch.manual_seed(0)
    model, batch = SparseBags(), {"ids": torch.arange(7), "offsets": torch.tensor([0, 3, 4])}
    loss, _ = evaluate(trace(model, batch).graph, dict(model.named_parameters()), batch)
    (got,) = torch.autograd.grad(loss, model.parameters())
    (expected,) = torch.autograd.grad(model(**batch), model.parameters())
    assert not got.is_sparse
    torch.testing.assert_close(got, expected.to_dense())
