"""Baselines as programs of the same language: one device, DDP even and proportional, FSDP."""

from __future__ import annotations

from dataclasses import replace

from .cost import CostModel
from .ir import REPLICATE, Graph, Instruction, Program, Ratio, Ref, Shard, TensorType, make_ratio
from .rules import Units, call_of
from .synthesis import Prices, Problem, emit, search

# sharding by dim 0 of a batch at no price for gradients: what data parallelism is
DATA_PARALLEL = Prices(gradient_sync=0.0)


def data_parallel(graph: Graph, costs: CostModel, ratio: Ratio, units: Units | None = None) -> Program:
    """Every rank runs the model on its share of the batch; parameters are replicated."""
    problem = Problem(graph, costs, ratio, prices=DATA_PARALLEL, units=units, shard_params=False)
    return emit(problem, search(problem, max_states=2_000))


def fully_sharded(program: Program) -> Program:
    """``program`` with every replicated parameter stored S(0), gathered for use (ZeRO-3, FSDP)."""
    ratio_name = program.ratios[0][0]
    out: list[Instruction] = []
    for i in program.instructions:
        gathered = i.op == "param" and i.type.placement == REPLICATE and i.type.value.shape
        if gathered and i.result in program.requires_grad:
            stored = TensorType(i.type.value, (Shard(0),), ratio_name)
            name = f"{i.result}.shard"
            out.append(replace(i, results=(name,), types=(stored,), attrs=()))
            out.append(Instruction((i.result,), (i.type,), "all_gather", (Ref(name),)))
        else:
            out.append(i)
    return replace(program, instructions=tuple(out))


def device_seconds(graph: Graph, costs: CostModel, share: float = 1.0) -> tuple[float, ...]:
    """Per rank, the seconds of ``share`` of a step's work on that device, communication and optimizer
    apart."""
    by_class = [0.0] * len(costs.classes)
    for node in graph.nodes:
        if node.is_leaf or node.op == "update":
            continue
        call = call_of(node, graph.types)
        grads = sum(1 for name in dict.fromkeys(node.inputs) if name in graph.requires_grad)
        for c in range(len(costs.classes)):
            time = costs.op(call, grads, c)
            by_class[c] += time.forward.at(share) + time.backward.at(share)
    return tuple(by_class[c] for c in costs.class_of)


def proportional_ratio(graph: Graph, costs: CostModel) -> Ratio:
    """Shares in proportion to the speed at which each device runs an equal share of this very model."""
    seconds = device_seconds(graph, costs, 1 / costs.cluster.world_size)
    return make_ratio([1 / max(s, 1e-12) for s in seconds])


def only(rank: int, world_size: int) -> Ratio:
    return make_ratio([1.0 if r == rank else 0.0 for r in range(world_size)])
