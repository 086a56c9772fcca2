"""Measures a job's distinct operators, forward and backward, on shards of a few sizes."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...base.heap import KEPT_BYTES, OWN_PIECE_BYTES
from ...cluster import Device
from ...cost import VIEWS, Curve, OpMeasurement, call_flop, moved_bytes, op_key, roofline_s
from ...cost.model import is_product
from ...cost.profile import cut_inputs
from ...frontend.trace.dtypes import TORCH_DTYPE
from ...lang.ir import (
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
from ...lang.operators.norms import mark_summed
from ...lang.rules import (
    EXPERTS,
    RULES,
    SELECTED,
    Call,
    Strategy,
    call_of,
    count_experts,
    selected_share,
    shard_units,
    strategies,
)
from ...runtime.allocator import give_back, resident_bytes
from ...runtime.local import local_op
from ...runtime.random import RandomPolicy
from .meter import Meter

LESS, MORE = 0.5, 1.6  # factors on the device's likely share
NEARLY_ALL = 0.6  # from here on, the whole is measured: a plan may leave all other devices out
LEAST = 1 / 16  # factor on the likely share for a small micro-batch
# bytes written before each run of an operator: about as many as the rest of a pass touches
EVICTED_BYTES = 8 * 2**20
EMBEDDING = "aten.embedding"
NORMALISE = "mixmesh.normalise"
COPIES = 5  # copies of inputs and outputs that an operator needs, including gradients and temporaries
FILLED = 0.9  # share of a device's memory that may be filled


def shares_to_measure(likely: float, world_size: int) -> tuple[float, ...]:
    """The shares to measure: around the likely share, and up to an even one."""
    most = max(likely * MORE, 1 / world_size)
    return likely * LESS, likely, 1.0 if most >= NEARLY_ALL else most


def measure_ops(
    graph: Graph,
    shares: Sequence[float],
    meter: Meter,
    device: torch.device,
    declared: Device,
    deadline: float,
    progress,
) -> tuple[dict[str, OpMeasurement], list[str]]:
    """Measures every distinct operator of the graph at these shares. Also returns the names of those for
    which there was no time."""
    bench = Bench(graph, shard_units(graph, RULES), meter, device, declared.memory_bytes, deadline)
    measurements: dict[str, OpMeasurement] = {}
    skipped: list[str] = []
    order = by_weight(graph, declared)
    likely = shares[1:2] or shares
    others = tuple(share for share in shares if share not in likely)
    for number, (key, (node, call)) in enumerate(order):
        if time.perf_counter() > deadline:
            skipped.append(node.op)
            continue
        progress(f"operators {number + 1}/{len(order)}: {node.op}")
        measurement = measure_op(bench, node, call, likely)
        if measurement is not None:
            measurements[key] = measurement
        else:
            skipped.append(node.op)
    measured = [(key, node, call) for key, (node, call) in order if key in measurements]
    weighted = [(key, node, call) for key, node, call in measured if has_weight(graph, node)]
    # A slow device may have no time for all of these. How much longer a product takes whose weight is cut can
    # only be measured, while other shares can be had from another device. A line through larger shares does
    # not give the cost of micro-batches.
    rounds = (
        ("with a part of their weight", weighted, partial(with_cuts, shares=likely)),
        ("at other shares", measured, partial(with_shares, shares=others)),
        ("on a micro-batch", measured, partial(with_least, share=shares[0] / LESS * LEAST)),
        ("with other parts of their weight", weighted, partial(with_cuts, shares=others)),
    )
    for words, operators, measure_more in rounds:
        for number, (key, node, call) in enumerate(operators):
            if time.perf_counter() > deadline:
                return measurements, skipped
            progress(f"operators {words} {number + 1}/{len(operators)}: {node.op}")
            measurements[key] = measure_more(measurements[key], bench, node, call)
    return measurements, skipped


@dataclass(frozen=True)
class Bench:
    """The operators to measure, and the device to measure them on."""

    graph: Graph
    units: Mapping[str, tuple[int, ...]]
    meter: Meter
    device: torch.device
    memory_bytes: float
    # time of ``time.perf_counter`` after which only one share of an operator is measured
    deadline: float = math.inf

    def has_room(self, size_bytes: float) -> bool:
        """Whether the process can take ``size_bytes`` more. A GPU's allocator would raise an error; a process
        on a CPU would be killed."""
        if self.device.type != "cpu":
            return True
        allowed = FILLED * self.memory_bytes - size_bytes
        if resident_bytes() > allowed:
            give_back()  # frees what earlier operators left in the heap
        return resident_bytes() <= allowed


def left_in_heap_bytes(graph: Graph, share: float) -> int:
    """The bytes that a step with this share of the batch leaves free in the heap: its results that are not
    mapped directly from the kernel, up to what the heap keeps at its end."""
    sizes = [
        t.size_bytes * share for n in graph.nodes if n.op not in VIEWS and not n.is_leaf for t in n.types
    ]
    return min(KEPT_BYTES, round(sum(size for size in sizes if size < OWN_PIECE_BYTES)))


def share_bytes(call: Call, strategy: Strategy | None, share: float) -> float:
    """The bytes of a call's inputs and outputs if a rank has this share of each cut tensor."""
    types = (*call.inputs, *call.outputs)
    placements = (*strategy.inputs, *strategy.outputs) if strategy else (REPLICATE,) * len(types)
    return sum(t.size_bytes * (share if isinstance(p, Shard) else 1) for t, p in zip(types, placements))


def by_weight(graph: Graph, device: Device) -> list[tuple[str, tuple[Node, Call]]]:
    """The distinct operators, each with one of its nodes, sorted by the estimated seconds of all its nodes in
    a step, the longest first. But the first product and the first other operator come before all others,
    because unmeasured operators are estimated from them."""
    distinct: dict[str, tuple[Node, Call]] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    for node in graph.nodes:
        if not node.is_leaf and not node.is_sink and node.op not in VIEWS:
            call = call_of(node, graph.types)
            distinct.setdefault(op_key(call), (node, call))
            seconds[op_key(call)] += roofline_s(call, device)
    order = sorted(distinct, key=lambda key: -seconds[key])
    first = {is_product(distinct[key][1]): key for key in reversed(order)}
    return [(key, distinct[key]) for key in dict.fromkeys([*first.values(), *order])]


def has_weight(graph: Graph, node: Node) -> bool:
    """Whether a node is a product with a parameter, or with a view of one."""
    rule = RULES.get(node.op)
    if rule is None or not rule.flops:
        return False
    producers = {r: n for n in graph.nodes for r in n.results if r is not None}
    for name in node.inputs[:2]:
        source = producers[name]
        while source.op in VIEWS and source.inputs:
            source = producers[source.inputs[0]]
        if source.op == "param":
            return True
    return False


def measure_op(bench: Bench, node: Node, call: Call, shares: Sequence[float]) -> OpMeasurement | None:
    chosen = next(iter(sharded(call)), None)
    curves = measure_curves(bench, node, call, chosen, shares)
    return None if curves is None else OpMeasurement(*curves, call_flop(call), moved_bytes(call))


def with_shares(
    known: OpMeasurement, bench: Bench, node: Node, call: Call, shares: Sequence[float]
) -> OpMeasurement:
    """The measurement extended by these shares."""
    strategy = next(iter(sharded(call)), None)
    curves = measure_curves(bench, node, call, strategy, shares) if strategy is not None else None
    return known if curves is None else extended(known, curves)


def with_least(known: OpMeasurement, bench: Bench, node: Node, call: Call, share: float) -> OpMeasurement:
    """The measurement extended by a smaller share, if that has whole elements. Few samples do little work on
    a weight, which then has to come from memory as in training: a loop over one operator would find it in the
    cache."""
    strategy = next(iter(sharded(call)), None)
    if strategy is None:
        return known
    curves = measure_curves(bench, node, call, strategy, (share,), evict=True)
    if curves is None or curves[0].points[-1][0] >= known.forward.points[0][0]:
        return known
    return extended(known, curves)


def with_cuts(
    known: OpMeasurement, bench: Bench, node: Node, call: Call, shares: Sequence[float]
) -> OpMeasurement:
    """The measurement extended by the other ways to cut a product, at these shares."""
    cuts = measure_cuts(bench, node, call, shares)
    more = {cut: joined(curves, known.cuts.get(cut, curves)) for cut, curves in cuts.items()}
    return replace(known, cuts=known.cuts | more)


def measure_cuts(
    bench: Bench, node: Node, call: Call, shares: Sequence[float]
) -> dict[str, tuple[Curve, Curve]]:
    """Measures the other ways to cut a product, by which of its inputs are cut."""
    by_cut = {cut_inputs(strategy.inputs): strategy for strategy in reversed(sharded(call))}
    usual = cut_inputs(sharded(call)[0].inputs) if by_cut else ""
    cuts_s = {}
    for cut, strategy in by_cut.items():
        if cut != usual:
            curves = measure_curves(bench, node, call, strategy, shares)
            if curves is not None:
                cuts_s[cut] = curves
    return cuts_s


def extended(known: OpMeasurement, curves: tuple[Curve, Curve]) -> OpMeasurement:
    """The measurement with the points of these forward and backward curves too."""
    forward, backward = joined((known.forward, known.backward), curves)
    return replace(known, forward=forward, backward=backward)


def joined(curves: tuple[Curve, Curve], others: tuple[Curve, Curve]) -> tuple[Curve, Curve]:
    """Forward and backward curves with the points of both, and of two at the same share the first."""
    return curves[0].joined(others[0]), curves[1].joined(others[1])


def sharded(call: Call) -> list[Strategy]:
    """All ways to cut a call, starting with that which cuts the batch, if it has one."""
    rule = RULES.get(call.op)
    options = [o for o in strategies(rule, call) if o.is_sharded] if rule else []
    return sorted(options, key=lambda o: Shard(0) not in o.inputs[:1] and Shard(0) not in o.outputs)


def measure_curves(
    bench: Bench,
    node: Node,
    call: Call,
    strategy: Strategy | None,
    shares: Sequence[float],
    *,
    evict: bool = False,
) -> tuple[Curve, Curve] | None:
    """Seconds of the forward and the backward over the share; None if the operator cannot run on made-up
    values, or memory does not suffice; it is then estimated by its class. ``evict`` makes caches cold before
    each run."""
    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []
    for target in shares if strategy is not None else (1.0,):
        if forward and time.perf_counter() > bench.deadline:
            break
        if not bench.has_room(COPIES * share_bytes(call, strategy, target)):
            continue
        try:
            program, real_share = shard_program(bench.graph, node, strategy, bench.units, min(target, 1.0))
            forward_s, backward_s = time_op(program, bench.meter, bench.device, evict=evict)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return None
        if forward and forward[-1][0] == real_share:
            continue
        forward.append((real_share, forward_s))
        backward.append((real_share, backward_s))
    return (Curve(tuple(forward)), Curve(tuple(backward))) if forward else None


def shard_program(
    graph: Graph, node: Node, strategy: Strategy | None, units, share: float
) -> tuple[Program, float]:
    """A program of one instruction whose rank 0 has about ``share`` of the work, and the exact share."""
    exact = 1.0

    def placed(name: str | None, value: ValueType, placement) -> TensorType:
        nonlocal exact
        if isinstance(placement, Shard) and name is not None:
            placement = Shard(placement.dim, units[name][placement.dim])
            size = value.shape[placement.dim]
            rows = size // placement.unit
            exact = max(1, round(rows * share)) / rows
        return TensorType(value, placement, "r0")

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


def time_op(
    program: Program, meter: Meter, device: torch.device, *, evict: bool = False
) -> tuple[float, float]:
    """Seconds forward and backward of rank 0's part of a one-instruction program."""
    body = program.instructions[-1]
    run = local_op(program, body, 0, device, RandomPolicy())
    if body.op == NORMALISE:
        run = _after_moments(run)
    tensor_of = made_up_tensors(program, device)
    inputs = [tensor_of[name] for name in body.inputs]
    other = torch.empty(EVICTED_BYTES if evict else 0, dtype=torch.uint8, device=device)
    between = other.zero_ if evict else None
    forward_s = meter.best(lambda: run(*inputs), between=between)
    out = [t for t in run(*inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in tensor_of.values() if t.requires_grad]
    if not out or not leaves:
        return forward_s, 0.0
    grads = [torch.ones_like(t) for t in out]
    backward_s = meter.best(
        lambda: torch.autograd.grad(out, leaves, grads, retain_graph=True, allow_unused=True),
        between=between,
    )
    return forward_s, backward_s


def _after_moments(operator: Callable) -> Callable:
    """The operator ``normalise`` as in a program, where the moments of its data were summed before."""

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        mark_summed(inputs[0])
        return operator(*inputs)

    return run


def made_up_tensors(program: Program, device: torch.device) -> dict[str, torch.Tensor]:
    """Values for the inputs of a one-instruction program on rank 0, such as its operator usually gets."""
    body = program.instructions[-1]
    smallest = min(
        (n for i in program.instructions[:-1] for n in i.type.value.shape if i.type.value.is_floating and n),
        default=2,
    )
    if body.op == EXPERTS:  # so that all experts are chosen equally often
        smallest = count_experts(call_of(body, program.types))
    shapes = {
        i.result: local_shape(i.type.value, i.type.placement, program.ratio(i.type.ratio), 0)
        for i in program.instructions[:-1]
    }
    if body.op == EMBEDDING:  # so that all rows of the table are used; a few would stay in a cache
        table = shapes[body.inputs[0]]
        smallest = table[0] if table else smallest
    tensor_of: dict[str, torch.Tensor] = {}
    for i in program.instructions[:-1]:
        shape = shapes[i.result]
        assert shape is not None  # rank 0 has a share
        tensor_of[i.result] = example(i.type.value.dtype, shape, smallest, device)
    if body.op == SELECTED:
        mask = tensor_of[body.inputs[0]]
        mask.copy_(torch.rand(mask.shape, device=device) < selected_share(call_of(body, program.types)))
    return tensor_of


def example(dtype: str, shape: tuple[int, ...], below: int, device: torch.device) -> torch.Tensor:
    kind = TORCH_DTYPE[dtype]
    if kind.is_floating_point:
        return torch.randn(shape, device=device).to(kind).requires_grad_()
    if kind == torch.bool:
        return torch.rand(shape, device=device) < 0.5
    return torch.randint(0, max(2, below), shape, device=device).to(kind)
