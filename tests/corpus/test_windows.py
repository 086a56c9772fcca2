"""Operators that read windows, patches and repetitions, one of which may be all there is."""

from __future__ import annotations

import pytest
import torch
from corpus import CLUSTERS, check_planners
from torch import nn
from torch.nn import functional as F

PLANNERS = ("hap", "segments", "tensor-parallel", "placed")


class Classifier(nn.Module):
    """Features of an image by ``body``, their mean, and a linear layer."""

    def __init__(self, body, width: int, **layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.body, self.head = nn.ModuleDict(layers), body, nn.Linear(width, 5)

    def forward(self, x, y):
        features = self.body(self.layers, x)
        return F.cross_entropy(self.head(features.flatten(2).mean(2) if features.dim() > 2 else features), y)


def images(*shape: int) -> dict[str, torch.Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return {"x": x, "y": torch.arange(shape[0]) % 5}


def patches(layers, x):
    """A linear layer of every patch of 14 x 14 of grey images."""
    return layers["patch"](F.unfold(x, 14, stride=14).transpose(1, 2)).transpose(1, 2)


def folded(layers, x):
    return F.fold(F.unfold(layers["conv"](x), 4, stride=4) * 2, (8, 8), 4, stride=4)


def repeated(layers, x):
    return layers["conv"](x).mean((2, 3), keepdim=True).flatten(2).repeat_interleave(6, 2)


def shuffled(layers, x):
    return F.pixel_shuffle(layers["conv"](x).mean((2, 3), keepdim=True), 2)


def queried(layers, x):
    """Four heads of queries to one head of keys and values."""
    tokens = layers["conv"](x).flatten(2).transpose(1, 2)
    q = layers["q"](tokens).unflatten(2, (4, 4)).transpose(1, 2)
    k, v = (layers[name](tokens).unflatten(2, (1, 4)).transpose(1, 2) for name in "kv")
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2).transpose(1, 2)


def conv(width: int = 8, channels: int = 3) -> nn.Module:
    return nn.Conv2d(channels, width, 3, padding=1)


MODELS = {
    "largest of all": (lambda m, x: F.max_pool2d(m["conv"](x), 48), 8, {"conv": conv()}, (4, 3, 48, 48)),
    "average of all": (lambda m, x: F.avg_pool2d(m["conv"](x), 24), 8, {"conv": conv()}, (4, 3, 24, 24)),
    "one patch": (lambda m, x: m["conv"](x), 8, {"conv": nn.Conv2d(3, 8, 16, stride=16)}, (5, 3, 16, 16)),
    "patches in a row": (lambda m, x: m["conv"](x), 8, {"conv": nn.Conv2d(3, 8, 8, stride=8)}, (5, 3, 8, 40)),
    "one window in time": (lambda m, x: m["conv"](x), 8, {"conv": nn.Conv1d(6, 8, 9, stride=9)}, (5, 6, 9)),
    "a kernel of three on three": (lambda m, x: m["conv"](x), 8, {"conv": nn.Conv1d(6, 8, 3)}, (5, 6, 3)),
    "transposed": (
        lambda m, x: m["up"](m["conv"](x)), 4,
        {"conv": conv(), "up": nn.ConvTranspose2d(8, 4, 6, stride=6)}, (5, 3, 6, 6),
    ),
    "mirrored": (
        lambda m, x: m["conv"](F.pad(x, (2, 2, 2, 2), "reflect")), 8, {"conv": conv()}, (5, 3, 7, 7),
    ),
    "adaptive": (
        lambda m, x: F.adaptive_avg_pool2d(m["conv"](x), (1, 5)), 8, {"conv": conv()}, (5, 3, 7, 10),
    ),
    "grey patches": (patches, 256, {"patch": nn.Linear(196, 256)}, (8, 1, 28, 28)),
    "folded": (folded, 1, {"conv": conv(1, 1)}, (8, 1, 8, 8)),
    "repeated": (repeated, 8, {"conv": conv()}, (8, 3, 6, 6)),
    "shuffled": (shuffled, 1, {"conv": conv(4)}, (8, 3, 6, 6)),
    "one head of keys": (
        queried, 16,
        {"conv": conv(), "q": nn.Linear(8, 16), "k": nn.Linear(8, 4), "v": nn.Linear(8, 4)}, (6, 3, 5, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_equals_single_device(name):
    body, width, layers, shape = MODELS[name]
    torch.manual_seed(0)
    check_planners(Classifier(body, width, **layers), images(*shape), PLANNERS, CLUSTERS[1:])
