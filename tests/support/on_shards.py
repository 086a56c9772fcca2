"""A model on unequal shards against the module on one device, as tests of what a trace writes out ask."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks import coverage
from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Program
from mixmesh.measure.verification import unsupported_ops, verify

CLUSTER = Cluster.parse(coverage.CLUSTER)


def assert_equals_one_device(model: nn.Module, batch: Any) -> Program:
    """Plans for three unequal devices by HAP's search and by proportional data parallelism: all operators
    have a rule, and both plans equal the module. Returns the program of the latter."""
    traced = trace(model, batch)
    for planner in ("hap", "ddp-proportional"):
        plan = plan_traced(traced, CLUSTER, planner=planner)
        assert unsupported_ops(plan.program) == ()
        report = verify(model, batch, plan, traced=traced)
        assert report.ok, f"{planner}: {report}"
    return plan.program


def assert_samples_stay(program: Program) -> None:
    """No rank needs rows of another one."""
    moved = {i.op for i in program.instructions} & {"all_gather", "all_to_all"}
    assert not moved, "samples need no others"
