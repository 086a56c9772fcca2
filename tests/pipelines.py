"""Pipelines for tests: a small language model cut into stages by hand."""

from __future__ import annotations

import torch
from programs import make_plan
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Graph, Program, even_ratio, make_ratio, samples_of
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.search.baselines import data_parallel
from mixmesh.search.placement import Placed, lower

WORLD, BATCH, TIME, VOCABULARY, WIDTH = 4, 12, 5, 11, 8
CLUSTER = """\
name = "four"
[network]
bandwidth_gbit_per_s = 2
latency_us = 50
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3, count = 2 }]
[[machine]]
devices = [{ cpu_share = 0.5 }]
"""
COSTS = CostModel(Cluster.parse(CLUSTER))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Language(nn.Module):
    """The table is the head's weight too, positions are no input, some labels are ignored, and what comes out
    of the first block is needed again at the end."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.places = nn.Embedding(TIME, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = self.table.weight
        self.dropout = dropout

    def forward(self, ids, labels):
        h = self.table(ids) + self.places(torch.arange(TIME))
        first = h = self.blocks[0](h)
        for block in self.blocks[1:]:
            h = nn.functional.dropout(block(h), self.dropout) if self.dropout else block(h)
        logits = self.head(h + first)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def model_of(seed: int = 0, dropout: float = 0.0) -> Language:
    torch.manual_seed(seed)
    return Language(dropout)


def batch(step: int = 0, size: int = BATCH) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (size, TIME), generator=g)
    labels = ids.roll(-1, 1)
    labels[torch.rand(size, TIME, generator=g) < 0.3] = -100
    return {"ids": ids, "labels": labels}


def chain(model: nn.Module, inputs: dict, stages, costs: CostModel = COSTS, syncs=(), last=()) -> Program:
    """A model cut into as many parts as there are ``stages``, ratios, of about as many operators each; the
    operators in ``last`` are in the last."""
    return cut_into(trace(model, inputs).graph, stages, costs, syncs, last)


def cut_into(graph: Graph, stages, costs: CostModel, syncs=(), last=()) -> Program:
    program = data_parallel(graph, costs, even_ratio(costs.cluster.world_size))
    operators = [i for i in program.instructions if not (i.is_leaf or i.is_redistribution)]
    syncs = syncs or ("allreduce",) * len(stages)
    placed = [Placed(make_ratio(ratio), sync) for ratio, sync in zip(stages, syncs)]
    constants = {r for i in operators if not i.inputs for r in i.results}
    by_name = {}
    for n, i in enumerate(operators):
        name = next((r for r in i.results if r is not None), "")
        if name not in constants:
            by_name[name] = placed[-1 if name in last else n * len(stages) // len(operators)]
    return lower(program, by_name)


def pipelined(program: Program, micro_steps: int, cluster: Cluster = COSTS.cluster) -> Plan:
    """A plan of a chain with so many micro-batches."""
    counts = samples_of(program).counts
    assert all(n % micro_steps == 0 for n in counts), (counts, micro_steps)
    rows = (
        MicroBatch(*((n // micro_steps, micro_steps, n // micro_steps) if n else (0, 0, 0))) for n in counts
    )
    return make_plan(program, cluster, micro_batches=tuple(rows))


THREE_STAGES = ((1, 0, 0, 0), (0, 2, 1, 0), (0, 0, 0, 1))
FOUR_STAGES = tuple(tuple(float(r == stage) for r in range(WORLD)) for stage in range(WORLD))
