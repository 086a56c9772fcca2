"""The uneven plans that every idiom is tried under: data parallelism, shards of several kinds, owners."""

from __future__ import annotations

import torch
from test_gloo import Mlp, batch, build, close, program

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import LossSource, trace
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel, fully_sharded, only, tensor_parallel

__all__ = [
    "CUT", "PLANS", "Mlp", "batch", "build", "close", "named", "output_plan", "parallel", "plan_of",
    "program", "same_weights",
]  # fmt: skip

THREE = """
name = "three"
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3, count = 2 }]
"""
UNEVEN = (0.5, 0.333333, 0.166667)  # of 12 samples 6, 4 and 2
EVEN = (1 / 3, 1 / 3, 1 / 3)
OWNERS = (0.2, 0.0, 0.8)

CUT = (
    "fsdp",
    "tensor_parallel",
    "levels_to_owners",
    "one_stage_each",
)  # plans under which parameters are cut
PLANS = ("data_parallel", *CUT)


def named(*functions) -> dict:
    """Checks by the name that a test asks for."""
    return {f.__name__.removeprefix("check_"): f for f in functions}


def parallel(name: str):
    """The same model on a single device and in parallel, without optimizers."""
    single = Mlp(0)
    model, _ = parallelize(Mlp(0), None, program(name), device="cpu", timeout_s=20)
    return single, model


def same_weights(single: torch.nn.Module, model) -> None:
    for key, value in model.full_state_dict().items():
        if key != "count":
            close(value, single.state_dict()[key], key)
    for key, value in model.state_dict().items():
        if type(value) is torch.Tensor and key != "count":  # whole on every rank: no rank may drift
            close(value, single.state_dict()[key], f"{key} on this rank")


def plan_of(model: torch.nn.Module, inputs: dict, stage: int, autocast: tuple | None = None) -> Plan:
    """Data parallelism over three uneven ranks, parameters held as of a stage of ZeRO (0: whole)."""
    traced = trace(model, inputs, autocast=autocast)
    plain = data_parallel(traced.graph, CostModel(Cluster.parse(THREE)), UNEVEN)
    cut = with_stage(plain, stage, OWNERS) if stage else plain
    fingerprint = traced.graph.fingerprint
    return Plan(cut, "test", 0.0, (), "", graph_fingerprint=fingerprint, autocast=autocast)


MICRO_BATCHES = (MicroBatch(4, 2, 2), MicroBatch(4, 1, 4), MicroBatch(1, 2, 1))  # of 6, 4 and 2 samples


def output_plan(
    kind: str, model: torch.nn.Module, inputs: dict | tuple, outputs: tuple = (), *, is_outside: bool = False
) -> Plan:
    """A plan with outputs beside the loss, or of a model without one, over three ranks."""
    loss = LossSource.MAYBE_CALLER if is_outside else LossSource.RETURNED
    traced = trace(model, inputs, outputs=outputs, loss=loss)
    costs = CostModel(Cluster.parse(THREE))
    program = {
        "data_parallel": lambda: data_parallel(traced.graph, costs, UNEVEN),
        "even": lambda: data_parallel(traced.graph, costs, EVEN),
        "fsdp": lambda: fully_sharded(data_parallel(traced.graph, costs, UNEVEN)),
        "tensor_parallel": lambda: tensor_parallel(traced.graph, costs, UNEVEN),
        "micro_steps": lambda: data_parallel(traced.graph, costs, UNEVEN),
        "one_rank": lambda: data_parallel(traced.graph, costs, only(1, 3)),
    }[kind]()
    return Plan(
        program,
        "test",
        0.0,
        (),
        "",
        graph_fingerprint=traced.graph.fingerprint,
        output_has_loss=traced.output_has_loss,
        arguments=traced.arguments,
        returned=traced.returned,
        left=traced.left,
        micro_batches=MICRO_BATCHES if kind == "micro_steps" else None,
    )
