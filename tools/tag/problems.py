"""Random models on random clusters, to train on and to measure by. None is of ``workloads``, nor a preset."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn

from mixmesh.base.units import GBIT, GIB, MICRO
from mixmesh.cluster import Cluster, Device, Machine
from mixmesh.cluster.catalogue import CATALOGUE
from mixmesh.cost import CostModel
from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads.images import Classifier
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Graph, even_ratio
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.search.baselines import data_parallel
from mixmesh.search.placement import Space, make_grouping
from mixmesh.search.placement.groups import NUM_GROUPS

CONTEXT_BYTES = 2**30  # on every device, beside what a model needs
MAX_DEVICES = 16


@dataclass(frozen=True)
class Model:
    graph: Graph
    need_bytes: float  # for parameters with all that belongs to them, and for activations, on one device


# a list of its own: problems of one seed stay the same when the catalogue grows
DEVICES = tuple(
    """
    V100-16GB V100-32GB V100S-32GB P100-12GB P100-16GB T4-16GB A100-40GB A100-80GB A800-80GB H100-80GB
    H100PCIe-80GB H200-141GB L4-24GB A10-24GB L40S-48GB GTX1070-8GB GTX1080-8GB GTX1080Ti-11GB
    RTX2060-6GB RTX2070-8GB RTX2080-8GB RTX2080Ti-11GB RTX3060-12GB RTX3060Ti-8GB RTX3070-8GB
    RTX3070Ti-8GB RTX3080-10GB RTX3080-12GB RTX3080Ti-12GB RTX3090-24GB RTX3090Ti-24GB RTX4060-8GB
    RTX4060Ti-8GB RTX4060Ti-16GB RTX4070-12GB RTX4070SUPER-12GB RTX4070Ti-12GB RTX4080-16GB
    RTX4080SUPER-16GB RTX4090-24GB RTX5070-12GB RTX5070Ti-16GB RTX5080-16GB RTX5090-32GB RTXA6000-48GB
    RX7900XTX-24GB MI100-32GB MI210-64GB MI300X-192GB
    """.split()
)


def random_model(rng: random.Random) -> Model:
    """A dense network, convolutions under a dense head, or a transformer."""
    with torch.device("meta"):
        job = rng.choice((dense, convolutional, convolutional, language, language, language))(rng)
    graph = trace(job.model, job.batch).graph
    params = sum(p.numel() * 4 for p in job.model.parameters())
    kept = sum(t.size_bytes for name, t in graph.types.items() if name in graph.requires_grad)
    return Model(graph, (2 + ADAM.kept) * params + kept - params)


def dense(rng: random.Random) -> Job:
    widths = [rng.choice((256, 512, 1024, 2048, 4096, 8192)) for _ in range(rng.randint(4, 14))]
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    head = nn.Linear(widths[-1], 16)
    return _classified(nn.Sequential(*layers), head, (rng.choice((64, 256, 1024, 4096)), widths[0]))


def convolutional(rng: random.Random) -> Job:
    """Stages of convolutions, each half as wide and high as the one before, under one to three dense layers.
    Some have batch norm; in some, every second convolution is one per channel."""
    pixels, channels = rng.choice((16, 32, 64, 96, 160)), 3
    width = rng.choice((16, 32, 48, 64))
    stages = rng.randint(2, 5 if pixels > 32 else 4)
    each, norm, by_channel = rng.randint(1, 5), rng.random() < 0.3, rng.random() < 0.2
    side = pixels
    layers: list[nn.Module] = []
    for _ in range(stages):
        for n in range(rng.randint(1, each)):
            if by_channel and n % 2:
                layers.append(nn.Conv2d(channels, channels, 3, padding=1, groups=channels))
            else:
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                channels = width
            layers += [nn.BatchNorm2d(channels)] * norm + [nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        side, width = side // 2, min(2 * width, 640)
    inputs = channels * side * side
    if rng.random() < 0.3:
        layers.append(nn.AdaptiveAvgPool2d(1))
        inputs = channels
    head: list[nn.Module] = [nn.Flatten()]
    for _ in range(rng.randint(0, 2)):
        hidden = rng.choice((128, 512, 1024, 2048, 3072, 6144, 8192))
        head += [nn.Linear(inputs, hidden), nn.ReLU()]
        inputs = hidden
    head.append(nn.Linear(inputs, rng.choice((16, 200, 2000))))
    images = 2 ** rng.randint(5, 9) if pixels <= 64 else rng.choice((32, 96, 256))
    return _classified(nn.Sequential(*layers), nn.Sequential(*head), (images, 3, pixels, pixels))


def language(rng: random.Random) -> Job:
    width, seq, words = (
        rng.choice((128, 256, 384, 640, 896, 1280)),
        rng.choice((8, 16, 64, 192, 384)),
        rng.choice((512, 8192, 24_000, 60_000)),
    )
    depth = rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 24))
    layers = [Layer(width, 4, rng.choice((2, 4)) * width) for _ in range(depth)]
    model = LanguageModel(layers, words=words, seq=seq, width=width, tied=rng.random() < 0.3)
    tokens = torch.zeros(2, rng.choice((16, 32, 64, 128, 256, 512)), seq, dtype=torch.long)
    return Job(model, {"tokens": tokens[0], "targets": tokens[1]})


def _classified(features: nn.Module, head: nn.Module, shape: tuple[int, ...]) -> Job:
    labels = torch.zeros(shape[0], dtype=torch.long)
    return Job(Classifier(features, head), {"images": torch.zeros(shape), "labels": labels})


def random_cluster(rng: random.Random, need_bytes: float) -> Cluster:
    """Two to eight machines of one to eight devices, of up to three types; on some clusters as many in each.
    On every third cluster memory is tight: from too little for a whole model on one device to a little more
    than that. Links between machines are from thin to wide."""
    tight = rng.random() < 1 / 3
    each = rng.choice((1, 2, 2, 4)) if rng.random() < 0.4 else None
    bandwidth = rng.choice((1, 2.5, 5, 8, 10, 25, 50, 100)) * GBIT
    rows = [CATALOGUE[name] for name in rng.sample(DEVICES, rng.randint(1, 3))]
    machines: list[Machine] = []
    devices = 0
    for n in range(rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 8))):
        count = min(each or rng.choice((1, 1, 2, 2, 4, 8)), MAX_DEVICES - devices)
        if not count:
            break
        row = rng.choice(rows)
        memory = row.memory_gib * GIB
        if tight:
            memory = min(memory, CONTEXT_BYTES + need_bytes * rng.uniform(0.3, 1.3))
        device = Device(f"{row.name}-{n}", row.tflop_per_s * 1e12, int(memory), row.memory_gbyte_per_s * 1e9)
        link = rng.choice((24, 64, 100, 400, 1200)) * GBIT
        nic = min(bandwidth, rng.choice((10, 25, 50, 100)) * GBIT)
        machines.append(Machine(f"m{n}", (device,) * count, float(link), float(10 * MICRO), float(nic)))
        devices += count
    return Cluster("random", tuple(machines), float(bandwidth), float(20 * MICRO))


def random_space(rng: random.Random, model: Model) -> Space:
    """Half of them with as many groups as planning has, the others with fewer or a few more."""
    costs = CostModel(random_cluster(rng, model.need_bytes))
    program = data_parallel(model.graph, costs, even_ratio(costs.cluster.world_size))
    count = rng.choice((NUM_GROUPS, rng.randint(8, 46)))
    return Space(program, costs, make_grouping(model.graph, costs, count))
