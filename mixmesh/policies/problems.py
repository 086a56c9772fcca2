"""Random small models on random clusters, to train on. None is of ``workloads``, nor a preset."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn

from ..baselines import data_parallel
from ..catalogue import CATALOGUE
from ..cluster import Cluster, Device, Machine
from ..cost import CostModel
from ..ir import Graph, even_ratio
from ..job import Job
from ..placement import Space, make_grouping
from ..trace import trace
from ..units import GBIT, GIB, MICRO
from ..workloads.images import Classifier
from ..workloads.language import LanguageModel
from ..workloads.layers import Layer

STATES = 2  # of Adam
CONTEXT_BYTES = 2**30  # of every device, beside what a model needs
MAX_DEVICES = 13  # one is left for a fourth machine after three of four


@dataclass(frozen=True)
class Model:
    graph: Graph
    need_bytes: float  # of parameters with all that belongs to them, and of activations, on one device


def random_model(rng: random.Random) -> Model:
    """A dense network, convolutions under a dense head, or a transformer."""
    with torch.device("meta"):
        job = rng.choice((dense, convolutional, language))(rng)
    graph = trace(job.model, job.batch).graph
    params = sum(p.numel() * 4 for p in job.model.parameters())
    kept = sum(t.size_bytes for name, t in graph.types.items() if name in graph.requires_grad)
    return Model(graph, (2 + STATES) * params + kept - params)


def dense(rng: random.Random) -> Job:
    widths = [rng.choice((256, 512, 1024, 2048, 4096, 8192)) for _ in range(rng.randint(4, 8))]
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    head = nn.Linear(widths[-1], 16)
    return _classified(nn.Sequential(*layers), head, (rng.choice((64, 256, 1024, 4096)), widths[0]))


def convolutional(rng: random.Random) -> Job:
    pixels, channels, width = rng.choice((16, 32, 64)), 3, rng.choice((16, 32, 64))
    side = pixels
    layers: list[nn.Module] = []
    for _ in range(rng.randint(2, 4)):
        for _ in range(rng.randint(1, 2)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
        side, width = side // 2, 2 * width
    hidden = rng.choice((128, 512, 2048, 8192))
    head = nn.Sequential(
        nn.Flatten(), nn.Linear(channels * side * side, hidden), nn.ReLU(), nn.Linear(hidden, 16)
    )
    return _classified(nn.Sequential(*layers), head, (2 ** rng.randint(5, 9), 3, pixels, pixels))


def language(rng: random.Random) -> Job:
    width, seq, words = (
        rng.choice((128, 256, 512, 1024)),
        rng.choice((16, 64, 256)),
        rng.choice((512, 8192, 40_000)),
    )
    layers = [Layer(width, 4, rng.choice((2, 4)) * width) for _ in range(rng.randint(1, 6))]
    model = LanguageModel(layers, words=words, seq=seq, width=width, tied=rng.random() < 0.3)
    tokens = torch.zeros(2, 2 ** rng.randint(4, 8), seq, dtype=torch.long)
    return Job(model, {"tokens": tokens[0], "targets": tokens[1]})


def _classified(features: nn.Module, head: nn.Module, shape: tuple[int, ...]) -> Job:
    labels = torch.zeros(shape[0], dtype=torch.long)
    return Job(Classifier(features, head), {"images": torch.zeros(shape), "labels": labels})


def random_cluster(rng: random.Random, need_bytes: float) -> Cluster:
    """Two to four machines of one to four devices of one or two types. On every second cluster memory is
    tight: from too little for a whole model on one device to a little more than that."""
    tight = rng.random() < 0.5
    bandwidth = rng.choice((5, 10, 25, 50, 100)) * GBIT
    machines, devices = [], 0
    for n in range(rng.randint(2, 4)):
        count = min(rng.choice((1, 2, 2, 4)), MAX_DEVICES - devices)
        row = rng.choice(list(CATALOGUE.values()))
        memory = row.memory_gib * GIB
        if tight:
            memory = min(memory, CONTEXT_BYTES + need_bytes * rng.uniform(0.3, 1.3))
        device = Device(f"{row.name}-{n}", row.tflop_per_s * 1e12, int(memory), row.memory_gbyte_per_s * 1e9)
        link = rng.choice((24, 64, 100, 400)) * GBIT
        nic = min(bandwidth, rng.choice((10, 25, 50, 100)) * GBIT)
        machines.append(Machine(f"m{n}", (device,) * count, float(link), float(10 * MICRO), float(nic)))
        devices += count
    return Cluster("random", tuple(machines), float(bandwidth), float(20 * MICRO))


def random_space(rng: random.Random, model: Model) -> Space:
    costs = CostModel(random_cluster(rng, model.need_bytes))
    program = data_parallel(model.graph, costs, even_ratio(costs.cluster.world_size))
    return Space(program, costs, make_grouping(model.graph, costs, rng.randint(8, 30)))
