"""Records the noise of own seconds for ``test_decisions``: four processes train on a machine that has less
cores than that, and other things to do.

``cd tests && python -m rebalance.record_noise`` writes ``recorded_noise.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gloo_world import assert_passed, run_world
from torch import nn

import mixmesh
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.first_rank import everyones
from mixmesh.runtime.train import train
from mixmesh.search.baselines import data_parallel

STEPS, SKIPPED = 420, 20
OUT = Path(__file__).with_name("recorded_noise.json")


class Recorder:
    """Keeps the own seconds of every step."""

    def __init__(self) -> None:
        self.own_s: list[float] = []

    def begin(self, model, optimizer, feed) -> None:
        pass

    def after_step(self, num_steps: int, step_s: float, own_s: float) -> None:
        self.own_s.append(round(own_s, 5))

    def end(self) -> None:
        columns = everyones(self.own_s)
        if torch.distributed.get_rank() == 0:
            rows = list(zip(*columns))[SKIPPED:]
            OUT.write_text(json.dumps({"own_s": rows}).replace("], [", "],\n[") + "\n")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(512, 512), nn.ReLU()] * 4
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return self.body(x).square().mean()


def record(_) -> None:
    cluster = Cluster.parse('name = "four"\n[[machine]]\ndevices = [{ cpu_share = 0.4, count = 4 }]')
    batch = {"x": torch.randn(1024, 512)}
    traced = trace(Net(), batch)
    program = data_parallel(traced.graph, CostModel(cluster), (0.25,) * 4)
    plan = Plan(program, "test", 0.02, (), cluster.fingerprint)
    train(mixmesh.Job(Net(), batch), plan, steps=STEPS, device="cpu", timeout_s=60, balancer=Recorder())


if __name__ == "__main__":
    assert_passed(run_world(4, {"record": record})["record"])
