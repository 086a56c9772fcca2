"""The files that are mutated: plans of every kind for small models, their cluster, a profile, a journal."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from mixmesh.cluster import Cluster
from mixmesh.cost import Curve, DeviceProfile, OpMeasurement, Profile, device_key, op_key
from mixmesh.cost.links import LinkMeasurement
from mixmesh.errors import InputError
from mixmesh.frontend.trace import Traced, trace
from mixmesh.lang.rules import call_of
from mixmesh.planner import make_plan

CLUSTER = """\
name = "four"
[network]
bandwidth_gbit_per_s = 2
latency_us = 50
[[machine]]
name = "a"
link_gbit_per_s = 100
devices = [{ cpu_share = 0.6 }, { device = "V100-16GB", count = 1 }]
[[machine]]
nic_gbit_per_s = 1.5
link_latency_us = 10
devices = [{ cpu_share = 0.5, kind = "cpu" },
           { name = "slow", tflop_per_s = 4.3, memory_gib = 12, memory_gbyte_per_s = 500 }]
"""
PLANNERS = ("ddp-proportional", "fsdp-even", "hap", "poplar", "pipeline", "tensor-parallel", "two-level")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids, labels):
        h = self.norm(self.table(ids)) * self.scale
        q = h.view(*ids.shape, 2, 4).transpose(1, 2)
        h = h + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.down(F.dropout(F.gelu(self.up(h)), 0.1))
        return F.cross_entropy((h @ self.table.weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(16, 5)

    def forward(self, x, y):
        h = F.max_pool2d(F.relu(self.norm(self.conv(x))), 4)
        one, other = self.head(h.flatten(1)).split([2, 3], 1)
        return F.mse_loss(torch.cat([other, one], 1), y) + 0.1 * self.head.weight.square().sum()


@dataclass(frozen=True)
class Model:
    """A model with its batch and graph."""

    module: nn.Module
    batch: dict[str, torch.Tensor]
    traced: Traced


@cache
def models() -> dict[str, Model]:
    torch.manual_seed(0)
    ids = torch.randint(11, (8, 4))
    batches = {
        "words": (Words(), {"ids": ids, "labels": ids.roll(1, 1)}),
        "pictures": (Pictures(), {"x": torch.randn(8, 3, 8, 8), "y": torch.randn(8, 5)}),
    }
    return {name: Model(m, b, trace(m, b)) for name, (m, b) in batches.items()}


@cache
def plans() -> tuple[tuple[str, str], ...]:
    """Names of models, each with the text of a plan for it."""
    cluster = Cluster.parse(CLUSTER)
    out = []
    for name, model in models().items():
        for planner in PLANNERS:
            with suppress(InputError):  # this planner is not for this model
                out.append((name, str(make_plan(model.traced, cluster, planner=planner))))
    return tuple(out)


@cache
def profile() -> str:
    """The text of a profile of all operators of the models."""
    cluster = Cluster.parse(CLUSTER)
    ops = {}
    for model in models().values():
        graph = model.traced.graph
        for node in graph.nodes:
            if not node.is_leaf and node.op != "update":
                curve = Curve(((0.25, 1e-4), (0.5, 1.5e-4), (1.0, 3e-4)))
                ops[op_key(call_of(node, graph.types))] = OpMeasurement(curve, curve.scaled(2), 10_000, 4_000)
    devices = {
        device_key(d): DeviceProfile(ops, 1e-9, 2**20, 1.1, 0.2, {"all_reduce": (1e-4, 1e-9)}, 2.0, 2**19)
        for d in cluster.devices
    }
    links = tuple(
        LinkMeasurement(name, "", (0, 1, 2, 3), ((4096, 1e-4), (2**20, 1e-2)), 1.0, "")
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    )
    return _saved(Profile(devices, links, {"cluster": cluster.fingerprint, "backend": "gloo"}))


def _saved(made: Profile) -> str:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder) / "p.json")
        return (Path(folder) / "p.json").read_text()


JOURNAL = json.dumps(
    {
        "bed": "mm01234567",
        "pid": 4_000_000,
        "start_time": "12345",
        "namespaces": ["mm01234567sw", "mm01234567m0"],
        "cgroups": ["/sys/fs/cgroup/mm01234567", "/sys/fs/cgroup/mm01234567/r0"],
    }
)
