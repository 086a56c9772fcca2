"""Image classifiers at CIFAR-10's size, 3 x 32 x 32: VGG19 and ViT of HAP, and ResNet-50."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..job import Job
from .layers import Layer, adam

CLASSES = 10
# convolutions by width; 0 is a pooling (Simonyan and Zisserman, 2015, configuration E)
VGG19 = (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0)


class Classifier(nn.Module):
    """Features, a head, and the mean cross-entropy."""

    def __init__(self, features: nn.Module, head: nn.Module):
        super().__init__()
        self.features, self.head = features, head

    def forward(self, images, labels):
        return F.cross_entropy(self.head(self.features(images)), labels)


def image_job(model: nn.Module, global_batch: int, side: int = 32, classes: int = CLASSES) -> Job:
    images = torch.randn(global_batch, 3, side, side)
    return Job(model, {"images": images, "labels": torch.randint(classes, (global_batch,))}, optimizer=adam)


class Widen(nn.Module):
    """Repeats [n, c, 1, 1] to [n, c * 7 * 7]: adaptive average pooling of one pixel to 7 x 7."""

    def forward(self, x):
        return x.expand(-1, -1, 7, 7).flatten(1)


def vgg19_convolutions() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG19:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg19(global_batch: int) -> Job:
    """HAP's VGG19: five poolings leave one pixel, which is repeated 7 x 7 times for the head of the ImageNet
    model (25088 inputs, 4096, 4096). The head has 119.6 M of the 139.6 M parameters."""
    head = nn.Sequential(
        Widen(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES)
    )
    return image_job(Classifier(vgg19_convolutions(), head), global_batch)


class VisionTransformer(nn.Module):
    def __init__(self, layers: int = 8, width: int = 768, heads: int = 12, patch: int = 4, side: int = 32):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros((side // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(Layer(width, heads, 4 * width, causal=False) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, 0]), labels)


def vit(global_batch: int) -> Job:
    """HAP's ViT, by its released code: 8 layers of 768, patches of 4 x 4, a class token."""
    return image_job(VisionTransformer(), global_batch)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.short = (
            nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            if channels != 4 * width
            else nn.Identity()
        )

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.short(x))


def resnet50(global_batch: int) -> Job:
    """ResNet-50 (He et al., 2016), 3 x 224 x 224, 1000 classes."""
    return resnet(global_batch, (3, 4, 6, 3))


def resnet(global_batch: int, stages: tuple[int, ...]) -> Job:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = 64
    for stage, blocks in enumerate(stages):
        for n in range(blocks):
            layers.append(Bottleneck(channels, 64 << stage, 2 if stage and n == 0 else 1))
            channels = 4 * (64 << stage)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return image_job(Classifier(nn.Sequential(*layers), head), global_batch, side=224)
