"""Pipelines, measured: a chain of stages in micro-batches, compared with the same chain without them.

whole    the stages of ours, each of which takes the whole batch at once while the others wait
plain    the planner's best of such chains
spread   data parallelism in proportion to speed
ours     ``model-parallel`` in micro-batches, as the simulator chooses
"""

from __future__ import annotations

from collections.abc import Mapping

from mixmesh.cost import CostModel
from mixmesh.lang.ir import Graph
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner.placed import model_parallel
from mixmesh.planner.proposal import Proposal
from mixmesh.planner.simple import ddp_proportional
from mixmesh.planner.task import Task

from .contest import OURS, Contest, Entry
from .measure import cluster_text

WHOLE, PLAIN, SPREAD = "whole", "plain", "spread"
TARGET = 1.2  # over plans without micro-batches


def ways(graph: Graph, costs: CostModel) -> Mapping[str, Entry]:
    task = Task(graph, costs, ADAM, lambda _: None)
    found = list(model_parallel(task))

    def best(proposals: list[Proposal]) -> Entry:
        chosen = min(proposals, key=lambda p: p.key)
        return Entry(chosen.program, chosen.micro_batches)

    ours = best([p for p in found if p.micro_batches is not None])
    several = [p for p in found if len(p.program.ratios) > 1]  # everything on one device is not a chain
    return {
        WHOLE: Entry(ours.program),
        PLAIN: best([p for p in several if p.micro_batches is None]),
        SPREAD: best(list(ddp_proportional(task))),
        OURS: ours,
    }


def _contest(name: str, job: str, gbit_per_s: str, *machines: tuple[str, ...]) -> Contest:
    return Contest(name, job, cluster_text(gbit_per_s, *machines), ways, ((WHOLE, TARGET), (PLAIN, TARGET)))


CASES = (
    _contest("pair", "gpt", "0.1", ("0.50",), ("0.30",)),
    _contest("three", "gpt", "0.1", ("0.40",), ("0.25",), ("0.25",)),
)
QUICK = CASES[:1]
