"""``auto`` on random clusters and real models: never slower in simulation than a candidate that it lists or a
baseline planned apart, and what it says fits does fit.

Three clusters for each model by default, 100 with ``MIXMESH_CLUSTERS=100``.
"""

from __future__ import annotations

import os
import random
import re
from functools import cache

import pytest

from mixmesh.cluster import Cluster
from mixmesh.cluster.device import HEADROOM
from mixmesh.cost import CostModel
from mixmesh.errors import Infeasible
from mixmesh.lang.ir import Graph
from mixmesh.planner import BASELINES, make_plan
from mixmesh.search.ratios import usable_bytes
from mixmesh.simulator import simulate

torch = pytest.importorskip("torch")
nn = torch.nn

CLUSTERS = int(os.environ.get("MIXMESH_CLUSTERS", "3"))
SAMPLES = 96
SAME = 1 + 1e-9


def random_cluster(seed: int) -> Cluster:
    """2 to 16 devices of at most four types on one to four machines, from slow to fast links, some devices
    too small for the model; every fourth cluster is of equal devices."""
    draw = random.Random(seed)
    types = [
        f'{{ name = "d{n}", tflop_per_s = {10 ** draw.uniform(-1, 1.5):.3f}, '
        f"memory_gib = {10 ** draw.uniform(-0.5, 1.3):.3f}, "
        f"memory_gbyte_per_s = {draw.uniform(50, 1500):.1f} }}"
        for n in range(1 if seed % 4 == 0 else draw.randint(2, 4))
    ]
    machines = draw.randint(1, 4)
    most = 16 // machines
    counts = [draw.randint(2 if machines == 1 else 1, most) for _ in range(machines)]
    lines = [f'name = "drawn {seed}"\n[network]']
    lines += [
        f"bandwidth_gbit_per_s = {10 ** draw.uniform(-0.5, 2):.2f}",
        f"latency_us = {draw.uniform(5, 100):.0f}",
    ]
    for count in counts:
        lines += ["[[machine]]", f"devices = [{', '.join(draw.choices(types, k=count))}]"]
        lines += [f"link_gbit_per_s = {10 ** draw.uniform(0, 2.7):.1f}"]
    return Cluster.parse("\n".join(lines) + "\n")


def gpt():
    from mixmesh.frontend.job.workloads.language import LanguageModel
    from mixmesh.frontend.job.workloads.layers import Layer

    return LanguageModel([Layer(128, 4, 512) for _ in range(2)], words=1000, seq=32, width=128), words()


def moe():
    from mixmesh.frontend.job.workloads.language import LanguageModel
    from mixmesh.frontend.job.workloads.layers import MoeLayer

    return LanguageModel([MoeLayer(128, 4, 512, experts=4, seq=32)], words=1000, seq=32, width=128), words()


def words():
    tokens = torch.zeros(2, SAMPLES, 32, dtype=torch.long)
    return {"tokens": tokens[0], "targets": tokens[1]}


class Squared(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def mlp():
    sizes = [(512, 2048), (2048, 2048), (2048, 64)]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    return Squared(*layers), (torch.empty(SAMPLES, 512),)


def cnn():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(4)]
    return Squared(*layers, nn.Flatten(), nn.Linear(32 * 64, 1000)), (torch.empty(SAMPLES, 3, 32, 32),)


MODELS = {"gpt": gpt, "mlp": mlp, "cnn": cnn, "moe": moe}


@cache
def graph_of(name: str) -> Graph:
    from mixmesh.frontend.trace import trace

    with torch.device("meta"):
        return trace(*MODELS[name]()).graph


def seconds_of(model: Graph, where: Cluster, planner: str) -> float:
    try:
        return make_plan(model, where, planner=planner).predicted_step_s
    except Infeasible:
        return float("inf")


@pytest.mark.parametrize("seed", range(CLUSTERS))
@pytest.mark.parametrize("name", MODELS)
def test_auto_is_the_fastest_of_all_that_fit(name, seed):
    model, where = graph_of(name), random_cluster(seed)
    apart = {planner: seconds_of(model, where, planner) for planner in BASELINES}
    try:
        plan = make_plan(model, where)
    except Infeasible:
        assert min(apart.values()) == float("inf")
        return
    shown = {c.planner: c.predicted_step_s for c in plan.candidates if c.feasible}
    for planner, step_s in (*apart.items(), *shown.items()):
        assert plan.predicted_step_s <= step_s * SAME, planner
    costs = CostModel(where)
    timeline = simulate(plan.program, costs, micro_batches=plan.micro_batches)
    assert timeline.step_s == pytest.approx(plan.predicted_step_s)
    for rank, peak in enumerate(timeline.peak_memory_bytes):
        assert peak <= usable_bytes(costs, rank, HEADROOM)


CRAMPED = """
[[machine]]
link_gbit_per_s = 64
devices = [
    { device = "A100-40GB", memory_gib = 1.45, name = "small" },
    { name = "slow", tflop_per_s = 0.05, memory_gib = 64, memory_gbyte_per_s = 20 },
]
"""


def test_planners_that_save_memory_are_asked_where_only_a_slow_plan_fits():
    """A slow device with much memory holds any model: a plan that fits is not always one to take."""
    model, where = graph_of("mlp"), Cluster.parse(CRAMPED)
    alone_s = seconds_of(model, where, "model-parallel")
    assert seconds_of(model, where, "hap") > 10 * alone_s
    assert make_plan(model, where).predicted_step_s <= alone_s * SAME


@pytest.mark.parametrize(
    ("memory_gib", "order"),
    [(None, ["hap", "pipeline", "two-level", "poplar"]), (1000, ["hap", "two-level", "pipeline"])],
    ids=["short of memory", "ample memory"],
)
def test_pipelines_are_tried_first_where_memory_is_short(memory_gib, order):
    """A fast step that fits spares two levels and ZeRO most of their search."""
    text = (
        CRAMPED
        if memory_gib is None
        else re.sub(r"memory_gib = [\d.]+", f"memory_gib = {memory_gib}", CRAMPED)
    )
    lines: list[str] = []
    make_plan(graph_of("mlp"), Cluster.parse(text), progress=lines.append)
    asked = [line.removeprefix("planning: ") for line in lines]
    assert [name for name in asked if name in ("hap", "pipeline", "two-level", "poplar")] == order


FAR = """
[network]
bandwidth_gbit_per_s = 0.02
latency_us = 50
[[machine]]
link_gbit_per_s = 100
link_latency_us = 1
devices = [
    { name = "big", tflop_per_s = 0.002, memory_gib = 8, memory_gbyte_per_s = 2 },
    { name = "middle", tflop_per_s = 0.001, memory_gib = 4, memory_gbyte_per_s = 1 },
]
[[machine]]
devices = [{ name = "small", tflop_per_s = 0.0005, memory_gib = 2, memory_gbyte_per_s = 0.5 }]
"""


@pytest.mark.parametrize("planner", ["hap", "auto"])
def test_data_parallelism_whose_sums_an_order_hides_leads(planner):
    """On all devices it is far slower than a plan for the near ones until its sums are hidden."""
    from mixmesh.frontend.trace import trace

    blocks = [
        layer
        for _ in range(4)
        for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 1))
    ]
    net = Squared(
        nn.Conv2d(3, 16, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5),
    )  # fmt: skip
    model, where = trace(net, (torch.empty(10, 3, 32, 32),)).graph, Cluster.parse(FAR)
    assert seconds_of(model, where, planner) <= seconds_of(model, where, "ddp-tuned") * SAME
