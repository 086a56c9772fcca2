"""ImageNet classifiers of HeteroG (CoNEXT'20): VGG-19, ResNet-200, Inception v3, MobileNet v2, NASNet.

The paper gives no image sizes: they are those of the models' own papers here.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..job import Job
from .images import Classifier, image_job, resnet, vgg19_convolutions

CLASSES = 1000


def _head(features: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, CLASSES))


class ConvNorm(nn.Sequential):
    """A convolution without bias, batch norm, and optionally an activation."""

    def __init__(self, inputs: int, outputs: int, kernel, stride=1, groups=1, act: nn.Module | None = None):
        kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = tuple(k // 2 for k in kernel)
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), *([act] if act else []))


def vgg19_224(global_batch: int) -> Job:
    """VGG-19 (Simonyan and Zisserman, 2015), 143.7 M parameters, 102.8 M of them in one dense layer."""
    dense = [nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES)]
    model = Classifier(vgg19_convolutions(), nn.Sequential(nn.Flatten(), *dense))
    return image_job(model, global_batch, side=224, classes=CLASSES)


def resnet200(global_batch: int) -> Job:
    """ResNet-200 (He et al., 2016b) in blocks of ResNet-50's kind, 64.7 M parameters."""
    return resnet(global_batch, (3, 24, 36, 3))


# --- Inception v3 (Szegedy et al., 2016) ----------------------------------------------------------------


class Branches(nn.Module):
    """Parallel branches whose channels are concatenated."""

    def __init__(self, *ways: nn.Module):
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x):
        return torch.cat([way(x) for way in self.ways], dim=1)


def _conv(inputs: int, outputs: int, kernel=1, stride: int = 1) -> nn.Module:
    return ConvNorm(inputs, outputs, kernel, stride, act=nn.ReLU())


def _chain(inputs: int, *steps: tuple) -> nn.Module:
    """Convolutions in sequence; a step is (outputs, kernel, stride)."""
    layers = []
    for outputs, *rest in steps:
        layers.append(_conv(inputs, outputs, *rest))
        inputs = outputs
    return nn.Sequential(*layers)


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), _conv(inputs, outputs))


def inception_v3(global_batch: int) -> Job:
    """Inception v3 without its second head, 23.8 M parameters, 3 x 299 x 299. All convolutions are padded,
    unlike the original's, so some feature maps are a little larger."""
    layers: list[nn.Module] = [
        _chain(3, (32, 3, 2), (32, 3), (64, 3)), nn.MaxPool2d(3, 2), _chain(64, (80,), (192, 3)),
        nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    for inputs, pooled in ((192, 32), (256, 64), (288, 64)):
        five, three = _chain(inputs, (48,), (64, 5)), _chain(inputs, (64,), (96, 3), (96, 3))
        layers.append(Branches(_conv(inputs, 64), five, three, _pooled(inputs, pooled)))
    twice = _chain(288, (64,), (96, 3), (96, 3, 2))
    layers.append(Branches(_conv(288, 384, 3, 2), twice, nn.MaxPool2d(3, 2, padding=1)))
    for w in (128, 160, 160, 192):
        once = _chain(768, (w,), (w, (1, 7)), (192, (7, 1)))
        twice = _chain(768, (w,), (w, (7, 1)), (w, (1, 7)), (w, (7, 1)), (192, (1, 7)))
        layers.append(Branches(_conv(768, 192), once, twice, _pooled(768, 192)))
    seven = _chain(768, (192,), (192, (1, 7)), (192, (7, 1)), (192, 3, 2))
    layers.append(Branches(_chain(768, (192,), (320, 3, 2)), seven, nn.MaxPool2d(3, 2, padding=1)))
    for inputs in (1280, 2048):
        three = nn.Sequential(_conv(inputs, 384), Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))))
        twice = nn.Sequential(
            _chain(inputs, (448,), (384, 3)), Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))
        )
        layers.append(Branches(_conv(inputs, 320), three, twice, _pooled(inputs, 192)))
    model = Classifier(nn.Sequential(*layers), _head(2048))
    return image_job(model, global_batch, side=299, classes=CLASSES)


# --- MobileNet v2 (Sandler et al., 2018) ----------------------------------------------------------------


class Inverted(nn.Module):
    """An inverted bottleneck: wide and depthwise inside, with a residual sum where the shape stays."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int):
        super().__init__()
        wide = inputs * expand
        widen = [ConvNorm(inputs, wide, 1, act=nn.ReLU6())] if expand > 1 else []
        depthwise = ConvNorm(wide, wide, 3, stride, groups=wide, act=nn.ReLU6())
        self.body = nn.Sequential(*widen, depthwise, ConvNorm(wide, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet_v2(global_batch: int) -> Job:
    """MobileNet v2, 3.5 M parameters."""
    layers: list[nn.Module] = [ConvNorm(3, 32, 3, 2, act=nn.ReLU6())]
    inputs = 32
    # (expand, outputs, repeats, stride): table 2
    for expand, outputs, repeats, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):  # fmt: skip
        for n in range(repeats):
            layers.append(Inverted(inputs, outputs, stride if n == 0 else 1, expand))
            inputs = outputs
    layers.append(ConvNorm(320, 1280, 1, act=nn.ReLU6()))
    return image_job(Classifier(nn.Sequential(*layers), _head(1280)), global_batch, side=224, classes=CLASSES)


# --- NASNet-A (Zoph et al., 2018) -----------------------------------------------------------------------


def _separable(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    """Two blocks of ReLU, a depthwise convolution, a pointwise one, and batch norm."""

    def once(a: int, step: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(a, a, kernel, step, kernel // 2, groups=a, bias=False)
        return [nn.ReLU(), depthwise, ConvNorm(a, outputs, 1)]

    return nn.Sequential(*once(inputs, stride), *once(outputs, 1))


class Cell(nn.Module):
    """A cell, which reads the outputs of the two cells before it; with ``stride`` 2 it is the reduction cell
    (figure 4)."""

    def __init__(self, before: int, last: int, width: int, stride: int, halves: bool):
        super().__init__()
        self.squeeze = nn.Sequential(nn.ReLU(), ConvNorm(last, width, 1))
        self.adjust = nn.Sequential(nn.ReLU(), ConvNorm(before, width, 1, 2 if halves else 1))
        kernels = (5, 3, 5, 3, 3) if stride == 1 else (5, 7, 7, 5, 3)
        self.ways = nn.ModuleList(
            _separable(width, width, k, stride if n < 4 else 1) for n, k in enumerate(kernels)
        )
        self.stride = stride

    def forward(self, before, last):
        p, x = self.adjust(before), self.squeeze(last)
        a, b, c, d, e = self.ways
        if self.stride == 1:
            parts = [p, a(x) + b(p), c(p) + d(p), _mean(x) + p, _mean(p) + _mean(p), e(x) + x]
            return torch.cat(parts, dim=1)
        first = a(x) + b(p)
        second = F.max_pool2d(x, 3, 2, 1) + c(p)
        third = _mean(x, 2) + d(p)
        parts = [second, third, F.max_pool2d(x, 3, 2, 1) + e(first), _mean(first) + second]
        return torch.cat(parts, dim=1)


def _mean(x, stride: int = 1):
    return F.avg_pool2d(x, 3, stride, 1, count_include_pad=False)


class NasNet(nn.Module):
    def __init__(self, repeats: int = 4, filters: int = 44):
        super().__init__()
        self.stem = ConvNorm(3, 32, 3, 2)
        cells, before, last, halves = [], 32, 32, False
        plan = [(filters // 4, 2), (filters // 2, 2)]
        for stage in range(3):
            plan += [(filters << stage, 2)] * (stage > 0) + [(filters << stage, 1)] * repeats
        for width, stride in plan:
            cells.append(Cell(before, last, width, stride, halves))
            before, last, halves = last, width * (4 if stride == 2 else 6), stride == 2
        self.cells, self.head = nn.ModuleList(cells), _head(last)

    def forward(self, images, labels):
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return F.cross_entropy(self.head(F.relu(last)), labels)


def nasnet(global_batch: int) -> Job:
    """NASNet-A (4 @ 1056), the mobile variant, 5.3 M parameters, without its second head."""
    return image_job(NasNet(), global_batch, side=224, classes=CLASSES)
