"""Jobs that one CPU core trains in about a second a step: a language model, experts, a convolutional
classifier, a perceptron. ``mixmesh/bench/jobs.py:gpt`` wherever a JOB is.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from mixmesh.job import Job
from mixmesh.workloads.images import Classifier
from mixmesh.workloads.language import LanguageModel
from mixmesh.workloads.layers import Layer, MoeLayer


def gpt() -> Job:
    """4 causal layers of 256 over bytes, 3.3 million parameters; 32 sequences of 64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer(256, 4, 1024) for _ in range(4)]
    return _language(LanguageModel(layers, words=256, seq=64, width=256), samples=32, seq=64)


def moe() -> Job:
    """Two layers of 192, each followed by one with 6 experts, two per token; 24 sequences of 48."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [Layer(192, 4, 768), MoeLayer(192, 4, 768, experts=6, seq=48)]
    return _language(LanguageModel(layers, words=256, seq=48, width=192), samples=24, seq=48)


def vgg() -> Job:
    """Six convolutions on 64 images of 32 x 32, most parameters in the fully connected layers behind."""
    torch.manual_seed(0)
    features: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        features.append(nn.MaxPool2d(2))
    head = nn.Sequential(
        nn.Flatten(), nn.Linear(128 * 16, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    model = Classifier(nn.Sequential(*features), head)
    batch = {"images": torch.randn(64, 3, 32, 32), "labels": torch.randint(10, (64,))}
    return Job(model, batch, optimizer=adamw)


class Perceptron(nn.Module):
    """Wide layers and a squared error: many parameters for little work."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [width, *[hidden] * layers, width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return F.mse_loss(self.layers[-1](x), y)


def mlp() -> Job:
    """512 - 1536 - 1536 - 1536 - 512, 6.3 million parameters; 512 samples."""
    torch.manual_seed(0)
    x = torch.randn(512, 512)
    return Job(Perceptron(512, 1536, 3), {"x": x, "y": x.roll(1, 1)}, optimizer=adamw)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def _language(model: nn.Module, samples: int, seq: int) -> Job:
    text = torch.randint(256, (samples, seq + 1))
    batch = {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
    return Job(model, batch, optimizer=adamw)
