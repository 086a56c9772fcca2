"""Jobs whose tensors are large beside the interpreter, to compare predicted with measured memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from mixmesh import Job
from mixmesh.frontend.job.workloads.images import Bottleneck, Classifier
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer, MoeLayer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def adamw_one_by_one(parameters):
    """Not fused: a choice of the user's."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


class Dropped(nn.Module):
    """A layer normalised before each half, with GELU and dropout."""

    def __init__(self, width: int, heads: int, p: float = 0.1):
        super().__init__()
        self.inner = Layer(width, heads, 4 * width, causal=False)
        self.p = p

    def forward(self, x):
        a = self.inner
        x = x + F.dropout(a.attention(a.norm1(x)), self.p)
        return x + F.dropout(a.down(F.gelu(a.up(a.norm2(x)))), self.p)


def tokens_job(layers, batch: int, seq: int, words: int, width: int, optimizer) -> Job:
    model = LanguageModel(layers, words=words, seq=seq, width=width)
    tokens = torch.randint(words, (2, batch, seq))
    return Job(model, {"tokens": tokens[0], "targets": tokens[1]}, optimizer=optimizer)


def gpt() -> Job:
    return tokens_job([Layer(512, 8, 2048) for _ in range(4)], 8, 128, 20_000, 512, adamw)


def gpt_long() -> Job:
    """Activations outweigh the parameters."""
    return tokens_job([Layer(256, 8, 1024) for _ in range(4)], 16, 512, 4_000, 256, momentum)


def bert_dropout() -> Job:
    return tokens_job([Dropped(384, 6) for _ in range(6)], 8, 256, 5_000, 384, adamw)


def moe() -> Job:
    layers = [MoeLayer(256, 4, 1024, experts=8, seq=128), Layer(256, 4, 1024)]
    return tokens_job(layers, 32, 128, 4_000, 256, adamw)


class Mlp(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, y)


def mlp() -> Job:
    x = torch.randn(2, 512, 3072)
    return Job(Mlp(3072, 4), {"x": x[0], "y": x[1]}, optimizer=adamw)


def wide() -> Job:
    """One matrix, of which the optimizer's step is the peak."""
    x = torch.randn(2, 16, 5120)
    return Job(Mlp(5120, 1), {"x": x[0], "y": x[1]}, optimizer=adamw)


def wide_one_by_one() -> Job:
    return replace(wide(), optimizer=adamw_one_by_one)


def mlp_sgd() -> Job:
    x = torch.randn(2, 8192, 1024)
    return Job(Mlp(1024, 6), {"x": x[0], "y": x[1]}, optimizer=sgd)


def images_job(model: nn.Module, batch: int, side: int, optimizer) -> Job:
    return Job(
        model,
        {"images": torch.randn(batch, 3, side, side), "labels": torch.randint(100, (batch,))},
        optimizer=optimizer,
    )


def vgg() -> Job:
    widths, channels, layers = (32, 32, 0, 64, 64, 0, 128, 128, 0), 3, []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    head = nn.Sequential(nn.Flatten(), nn.Linear(128 * 8 * 8, 2048), nn.ReLU(), nn.Linear(2048, 100))
    return images_job(Classifier(nn.Sequential(*layers), head), 96, 64, adamw)


def resnet() -> Job:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 32, 7, 2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = 32
    for stage, blocks in enumerate((1, 2, 1)):
        for n in range(blocks):
            layers.append(Bottleneck(channels, 32 << stage, 2 if stage and n == 0 else 1))
            channels = 4 * (32 << stage)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))
    return images_job(Classifier(nn.Sequential(*layers), head), 32, 112, momentum)
