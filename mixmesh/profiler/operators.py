"""Times of a job's distinct operators, forward and backward, on shards of a few sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ..cost import VIEWS, Curve, OpMeasurement, call_flop, moved_bytes, op_key
from ..ir import (
    REPLICATE,
    Graph,
    Instruction,
    Node,
    Program,
    Shard,
    TensorType,
    ValueType,
    local_shape,
    make_ratio,
)
from ..rules import RULES, Call, Strategy, call_of, shard_units, strategies
from ..runtime.local import local_op
from ..runtime.random import RandomPolicy
from ..trace.dtypes import TORCH_DTYPE
from .meter import Meter

LESS, MORE = 0.5, 1.6  # times the share that the device is likely to get


def shares_to_measure(likely: float, world_size: int) -> tuple[float, ...]:
    """Around the likely share, and up to an even one."""
    return tuple(min(s, 1.0) for s in (likely * LESS, likely, max(likely * MORE, 1 / world_size)))


def measure_ops(
    graph: Graph, shares: Sequence[float], meter: Meter, device: torch.device, deadline: float, progress
) -> tuple[dict[str, OpMeasurement], list[str]]:
    """Every distinct operator of the graph at these shares; names of those that time did not allow for."""
    units = shard_units(graph, RULES)
    found: dict[str, OpMeasurement] = {}
    skipped: list[str] = []
    distinct: dict[str, tuple[Node, Call]] = {}
    for node in graph.nodes:
        if not node.is_leaf and node.op != "update" and node.op not in VIEWS:
            call = call_of(node, graph.types)
            distinct.setdefault(op_key(call), (node, call))
    order = sorted(distinct.items(), key=lambda kv: -(call_flop(kv[1][1]) + moved_bytes(kv[1][1])))
    for number, (key, (node, call)) in enumerate(order):
        if time.perf_counter() > deadline:
            skipped.append(node.op)
            continue
        progress(f"operators {number + 1}/{len(order)}: {node.op}")
        made = measure_op(graph, node, call, units, shares, meter, device)
        if made is not None:
            found[key] = made
        else:
            skipped.append(node.op)
    return found, skipped


def measure_op(
    graph: Graph, node: Node, call: Call, units, shares: Sequence[float], meter: Meter, device: torch.device
) -> OpMeasurement | None:
    rule = RULES.get(node.op)
    options = strategies(rule, call) if rule else ()
    sharded = [o for o in options if o.is_sharded]
    by_batch = [o for o in sharded if Shard(0) in o.inputs[:1] or Shard(0) in o.outputs]
    chosen = next(iter(by_batch or sharded), None)
    forward, backward = [], []
    for target in shares if chosen is not None else (1.0,):
        try:
            made = shard_program(graph, node, chosen, units, min(target, 1.0))
            if made is None:
                continue
            program, real_share = made
            forward_s, backward_s = time_op(program, meter, device)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return None  # an operator that cannot run on made-up values is estimated by its class
        if forward and forward[-1][0] == real_share:
            continue
        forward.append((real_share, forward_s))
        backward.append((real_share, backward_s))
    if not forward:
        return None
    return OpMeasurement(Curve(tuple(forward)), Curve(tuple(backward)), call_flop(call), moved_bytes(call))


def shard_program(
    graph: Graph, node: Node, strategy: Strategy | None, units, share: float
) -> tuple[Program, float] | None:
    """A program of one instruction whose rank 0 has about ``share`` of the work, and the exact share."""
    exact = 1.0

    def placed(name: str | None, value: ValueType, placement) -> TensorType:
        nonlocal exact
        if isinstance(placement, Shard) and name is not None:
            placement = Shard(placement.dim, units[name][placement.dim])
            size = value.shape[placement.dim]
            rows = size // placement.unit
            exact = max(1, round(rows * share)) / rows
        return TensorType(value, (placement,), "r0")

    inputs = strategy.inputs if strategy else (REPLICATE,) * len(node.inputs)
    outputs = strategy.outputs if strategy else (REPLICATE,) * len(node.results)
    leaves = [
        Instruction((n,), (placed(n, graph.types[n], p),), "input", (n,))
        for n, p in dict(zip(node.inputs, inputs)).items()
    ]
    types = tuple(placed(n, t, p) for n, t, p in zip(node.results, node.types, outputs))
    ratio = make_ratio([exact, 1 - exact])
    body = Instruction(node.results, types, node.op, node.args, node.kwargs)
    loss = next(r for r in node.results if r is not None)
    return Program("op", 2, (("r0", ratio),), (*leaves, body), loss), exact


def time_op(program: Program, meter: Meter, device: torch.device) -> tuple[float, float]:
    """Seconds forward and backward of rank 0's part of a one-instruction program."""
    body = program.instructions[-1]
    run = local_op(program, body, 0, device, RandomPolicy())
    smallest = min(
        (n for i in program.instructions[:-1] for n in i.type.value.shape if i.type.value.is_floating and n),
        default=2,
    )
    made: dict[str, torch.Tensor] = {}
    for i in program.instructions[:-1]:
        t = i.type
        shape = local_shape(t.value, t.placement, program.ratio(t.ratio), 0)
        made[i.result] = example(t.value.dtype, shape, smallest, device)
    inputs = [made[name] for name in body.inputs]
    forward_s = meter.best(lambda: run(*inputs))
    out = [t for t in run(*inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in made.values() if t.requires_grad]
    if not out or not leaves:
        return forward_s, 0.0
    grads = [torch.ones_like(t) for t in out]
    backward_s = meter.best(
        lambda: torch.autograd.grad(out, leaves, grads, retain_graph=True, allow_unused=True)
    )
    return forward_s, backward_s


def example(dtype: str, shape: tuple[int, ...], below: int, device: torch.device) -> torch.Tensor:
    kind = TORCH_DTYPE[dtype]
    if kind.is_floating_point:
        return torch.randn(shape, device=device).to(kind).requires_grad_()
    if kind == torch.bool:
        return torch.rand(shape, device=device) < 0.5
    return torch.randint(0, max(2, below), shape, device=device).to(kind)
