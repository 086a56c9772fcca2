"""Layers over pieces of each sample, whose batch dim is samples times pieces: it is cut in whole samples."""

from __future__ import annotations

import pytest
import torch
from corpus import CLUSTERS, check_planners
from torch import nn
from torch.nn import functional as F

SAMPLES, PIECES = 8, 4
PLANNERS = ("ddp-proportional", "hap", "tensor-parallel", "pipeline")


class Pieces(nn.Module):
    """``run`` on the pieces of each sample, whose results are averaged."""

    def __init__(self, run, layer: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.run, self.layer, self.head = run, layer, nn.Linear(width, 5)

    def forward(self, x, y):
        h = self.run(self.layer, x.reshape(x.shape[0] * PIECES, 4, 16))
        return F.cross_entropy(self.head(h.reshape(x.shape[0], PIECES, -1).mean(1)), y)


def begun(layer, x):
    """With a first state of the model's own making."""
    state = x.new_zeros(1, x.shape[0], 16)
    return layer(x, (state, state + 0.1))[0][:, -1]


MODELS = {
    "gru": (lambda m, x: m(x)[0][:, -1], nn.GRU(16, 16, batch_first=True)),
    "lstm": (lambda m, x: m(x)[0][:, -1], nn.LSTM(16, 16, batch_first=True)),
    "lstm, its last state": (lambda m, x: m(x)[1][1][-1], nn.LSTM(16, 16, batch_first=True)),
    "lstm, begun": (begun, nn.LSTM(16, 16, batch_first=True)),
    "rnn, time first": (lambda m, x: m(x.transpose(0, 1))[0][-1], nn.RNN(16, 16)),
    "two layers, both ways": (
        lambda m, x: m(x)[0][:, 0, :16], nn.GRU(16, 16, 2, batch_first=True, bidirectional=True)
    ),
    "largest": (lambda m, x: torch.max(m(x), 1)[0], nn.Linear(16, 16)),
    "statistics": (lambda m, x: torch.var_mean(m(x), 1)[1], nn.Linear(16, 16)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_equals_single_device(name):
    torch.manual_seed(0)
    run, layer = MODELS[name]
    x = torch.randn(SAMPLES, PIECES * 4, 16)
    check_planners(Pieces(run, layer), {"x": x, "y": torch.arange(SAMPLES) % 5}, PLANNERS, CLUSTERS[1:])
