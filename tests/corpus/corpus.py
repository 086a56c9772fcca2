"""Traces a model, has it planned by each planner and verifies every plan, on its own shares and on skewed
ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import make_ratio, support
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.verification import verify

# slow devices and fast links: then small models are cut too
DEVICE = '{{ name = "{0}", tflop_per_s = {1}, memory_gib = {2}, memory_gbyte_per_s = {3} }}'
BIG, MIDDLE, SMALL = (
    DEVICE.format(*d) for d in (("big", 0.02, 8, 20), ("middle", 0.01, 4, 10), ("small", 0.003, 2, 5))
)


def make_cluster(name: str, *machines: tuple[str, ...]) -> Cluster:
    lines = [f'name = "{name}"', "[network]", "bandwidth_gbit_per_s = 40", "latency_us = 1"]
    for devices in machines:
        lines += ["[[machine]]", "link_gbit_per_s = 100", "link_latency_us = 1"]
        lines.append(f"devices = [{', '.join(devices)}]")
    return Cluster.parse("\n".join(lines))


CLUSTERS = (make_cluster("two", (BIG,), (SMALL,)), make_cluster("three", (BIG, MIDDLE), (SMALL,)))
PLANNERS = (
    "ddp-proportional", "fsdp-even", "hap", "tensor-parallel", "poplar", "segments", "pipeline",
    "model-parallel", "placed",
)  # fmt: skip


def skews(plan: Plan) -> Iterator[Plan]:
    """The plan with its first ratio as uneven as may be, where no other line says what it must be."""
    name, ratio = plan.program.ratios[0]
    ranks = support(ratio)
    if plan.micro_batches is not None or len(plan.program.ratios) > 1 or len(ranks) < 2:
        return
    for most, share in ((ranks[0], 1 - 1e-3 * (len(ranks) - 1)), (ranks[-1], 0.93)):
        rest = (1 - share) / (len(ranks) - 1)
        shares = [0.0 if r not in ranks else share if r == most else rest for r in range(len(ratio))]
        yield replace(plan, program=replace(plan.program, ratios=((name, make_ratio(shares)),)))


def check_planners(
    model: nn.Module, batch: Mapping[str, torch.Tensor], planners=PLANNERS, clusters=CLUSTERS, search_s=0.1
) -> list[Plan]:
    """Every plan is valid and trains as the single device does. Gives the plans."""
    traced = trace(model, batch)
    plans = []
    for cluster in clusters:
        for planner in planners:
            try:
                plan = plan_traced(traced, cluster, planner=planner, search_s=search_s)
            except InputError:
                continue  # nothing to propose here
            plans.append(plan)
            for variant in (plan, *skews(plan)):
                check_program(variant.program)
                report = verify(model, batch, variant, traced=traced)
                assert report.ok, (cluster.name, planner, variant.program.ratios, report)
    assert plans
    return plans
