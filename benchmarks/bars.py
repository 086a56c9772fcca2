"""Baselines for a gain, in addition to data parallelism on the whole cluster: a part of the cluster alone.

The owner of a mixed cluster may leave its slow part unused. So a plan must also beat the best that its
fastest device and each of its machines do alone, with data parallelism inside.
"""

from __future__ import annotations

from dataclasses import replace

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.lang.ir import Graph
from mixmesh.lang.optimizer_states import OptimizerStates
from mixmesh.planner.planners import BY_NAME
from mixmesh.planner.task import Task

PARALLEL = ("ddp-even", "ddp-proportional")


def machines_alone(cluster: Cluster) -> list[Cluster]:
    """A cluster for each machine alone, without duplicates."""
    kinds = {(m.devices, m.link_bytes_per_s, m.link_latency_s): m for m in cluster.machines}
    return [replace(cluster, name=f"{m.name} alone", machines=(m,)) for m in kinds.values()]


def fastest_s(task: Task, planners: tuple[str, ...]) -> float | None:
    """Seconds of the fastest step that fits, among the proposals of several planners; None if none fits."""
    made = (p for name in planners for p in BY_NAME[name].propose(task))
    return min((p.timeline.step_s for p in made if p.feasible), default=None)


def machine_alone_s(
    graph: Graph, cluster: Cluster, states: OptimizerStates, unmeasured: tuple[str, ...] = ()
) -> float | None:
    """Seconds of a step with the best data parallelism on a single machine of the cluster, with all samples;
    None if that fits in none."""
    steps = []
    for part in machines_alone(cluster):
        task = Task(graph, CostModel(part, unmeasured=unmeasured), states, lambda _: None)
        steps.append(fastest_s(task, ("single", *PARALLEL)))
    return least(*steps)


def least(*values: float | None) -> float | None:
    """The smallest known value; None if none is known."""
    return min((v for v in values if v is not None), default=None)
