"""Measures a job's operators on this rank's device, and the collectives between all ranks.

Every distinct operator of the job's graph runs forward and backward on shards of a few sizes around the
share that the device is likely to get. A device under a CPU quota runs short bursts at full speed and
then stands still, so single operators are timed by the CPU time of their thread; what a whole step takes
in real time, measured after them at two batch sizes, turns those into seconds (``step_scale``).
"""

from __future__ import annotations

import datetime
import math
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .cluster import Cluster
from .cost import (
    VIEWS,
    CollectiveFit,
    Curve,
    DeviceProfile,
    OpMeasurement,
    Profile,
    call_flop,
    device_key,
    moved_bytes,
    op_key,
)
from .ir import (
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
    shard_sizes,
)
from .rules import RULES, Call, Strategy, call_of, shard_units, strategies
from .runtime import collectives
from .runtime.comm import Comm
from .runtime.local import TORCH_DTYPES, local_op
from .runtime.random import RandomPolicy

SHARE_STEPS = (0.5, 1.0, 1.6)  # times the share that the device is likely to get
COLLECTIVE_BYTES = (2**12, 2**18, 2**22, 2**24)
REPEATS = 3


def profile(
    graph: Graph,
    job: Any,
    cluster: Cluster,
    *,
    budget_s: float = 60.0,
    device: torch.device | str | None = None,
    on_start: Callable[[], object] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """The profile of ``job`` on the cluster that this process is a rank of. Collective.

    Every rank measures its own device at the same time, as in training; of equal devices the median
    counts. Operators that the budget did not reach are named in the provenance.
    """
    comm = Comm.of_sets(cluster.world_size, (), device=device)
    started = time.perf_counter()
    constant = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    on_start()
    dist.barrier()
    meter = Meter(comm.device, emulated=os.environ.get("MIXMESH_EMULATION") == "quota")
    progress("collectives")
    fits = {name: fit_collective(comm, name, budget_s * 0.3 / 4) for name in MEASURED_COLLECTIVES}
    share = likely_share(cluster, comm.rank)
    progress("operators")
    deadline = started + budget_s * 0.7
    ops, skipped = measure_ops(graph, share, meter, comm.device, deadline, progress)
    progress("whole steps")
    scale, optimizer_s = measure_steps(graph, job, share, ops, meter, comm.device)
    mine = DeviceProfile(ops, optimizer_s, constant, scale)
    everyone: list[Any] = [None] * comm.world_size
    dist.all_gather_object(everyone, (device_key(cluster.devices[comm.rank]), mine, skipped))
    devices = {}
    for key in dict.fromkeys(k for k, _, _ in everyone):
        devices[key] = merge([p for k, p, _ in everyone if k == key])
    provenance = {
        "torch": torch.__version__,
        "cluster": cluster.fingerprint,
        "graph": graph.fingerprint,
        "device_type": comm.device.type,
        "emulation": os.environ.get("MIXMESH_EMULATION", "none: real devices"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1),
        "skipped": sorted({op for _, _, names in everyone for op in names}),
    }
    return Profile(devices, fits, provenance)


def merge(profiles: list[DeviceProfile]) -> DeviceProfile:
    """Equal devices: the one in the middle by the time of a whole step."""
    return sorted(profiles, key=lambda p: p.step_scale)[(len(profiles) - 1) // 2]


def likely_share(cluster: Cluster, rank: int) -> float:
    """The share of a batch that goes by the declared speeds."""
    return cluster.devices[rank].flop_per_s / sum(d.flop_per_s for d in cluster.devices)


class Meter:
    """Seconds of a piece of work on one device."""

    def __init__(self, device: torch.device, *, emulated: bool) -> None:
        self.device, self.emulated = device, emulated

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of ``work``: of the thread's CPU under a quota, of the wall otherwise."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        clock = time.thread_time if self.emulated else time.perf_counter
        started = clock()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return clock() - started

    def best(self, work: Callable[[], object], at_least_s: float = 2e-3) -> float:
        """The median of a few runs, short work repeated until the clock can tell."""
        first = self.once(work)
        inner = max(1, math.ceil(at_least_s / max(first, 1e-7))) if first < at_least_s else 1
        inner = min(inner, 50)

        def repeated():
            for _ in range(inner):
                work()

        return statistics.median(self.once(repeated) for _ in range(REPEATS)) / inner

    @staticmethod
    def wall(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started


# --- operators -----------------------------------------------------------------------------------------


def measure_ops(
    graph: Graph, share: float, meter: Meter, device: torch.device, deadline: float, progress
) -> tuple[dict[str, OpMeasurement], list[str]]:
    """Every distinct operator of the graph; names of those that time did not allow for."""
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
        made = measure_op(graph, node, call, units, share, meter, device)
        if made is not None:
            found[key] = made
        else:
            skipped.append(node.op)
    return found, skipped


def measure_op(
    graph: Graph, node: Node, call: Call, units, share: float, meter: Meter, device: torch.device
) -> OpMeasurement | None:
    rule = RULES.get(node.op)
    options = strategies(rule, call) if rule else ()
    sharded = [o for o in options if o.is_sharded]
    by_batch = [o for o in sharded if Shard(0) in o.inputs[:1] or Shard(0) in o.outputs]
    chosen = next(iter(by_batch or sharded), None)
    forward, backward = [], []
    wanted = [share * step for step in SHARE_STEPS] if chosen is not None else [1.0]
    for target in wanted:
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
    kind = TORCH_DTYPES[dtype]
    if kind.is_floating_point:
        return torch.randn(shape, device=device).to(kind).requires_grad_()
    if kind == torch.bool:
        return torch.rand(shape, device=device) < 0.5
    return torch.randint(0, max(2, below), shape, device=device).to(kind)


# --- whole steps ---------------------------------------------------------------------------------------


def measure_steps(
    graph: Graph, job: Any, share: float, ops: dict[str, OpMeasurement], meter: Meter, device: torch.device
) -> tuple[float, float]:
    """Real seconds of a local step over the sum of its operators', and optimizer seconds per byte."""
    model = job.model.to(device)
    make = job.optimizer or (lambda params: torch.optim.AdamW(params, lr=0.0))
    optimizer = make(model.parameters())
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    tensors = [t for t in tensors_of(job.batch) if t.dim()]
    rows = max((t.shape[0] for t in tensors), default=1)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    scales, optimizer_s = [], []
    for factor in (0.6, 1.0):
        count = max(1, round(rows * share * factor))
        batch = cut_batch(job.batch, rows, count, device)

        def step(batch=batch):
            out = model(**batch) if isinstance(batch, dict) else model(*batch)
            loss = (
                out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out.loss
            )
            loss.backward()

        step()
        measured = statistics.median(meter.wall(step) for _ in range(REPEATS))
        predicted = predicted_step_s(graph, ops, count / rows)
        if predicted > 0:
            scales.append(measured / predicted)
        optimizer.step()
        optimizer_s.append(statistics.median(meter.wall(optimizer.step) for _ in range(REPEATS)))
        optimizer.zero_grad()
    model.load_state_dict(state)
    scale = statistics.mean(scales) if scales else 1.0
    return scale, statistics.median(optimizer_s) / max(size_bytes, 1)


def predicted_step_s(graph: Graph, ops: dict[str, OpMeasurement], share: float) -> float:
    total = 0.0
    for node in graph.nodes:
        if node.is_leaf or node.op == "update":
            continue
        measured = ops.get(op_key(call_of(node, graph.types)))
        if measured is not None:
            total += measured.forward.at(share)
            if any(r in graph.requires_grad for r in node.results):
                total += measured.backward.at(share)
    return total


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]


def cut_batch(batch: Any, rows: int, count: int, device: torch.device) -> Any:
    def cut(t):
        if not isinstance(t, torch.Tensor):
            return t
        return (t[:count] if t.dim() and t.shape[0] == rows else t).to(device)

    return torch.utils._pytree.tree_map(cut, batch)


# --- collectives ---------------------------------------------------------------------------------------

MEASURED_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def fit_collective(comm: Comm, name: str, budget_s: float) -> CollectiveFit:
    """Latency and seconds per byte of the whole tensor, over all ranks, unequal pieces where they occur."""
    if comm.world_size < 2:
        return CollectiveFit(0.0, 0.0)
    points: list[tuple[float, float]] = []
    channel = comm.channel(comm.everyone, f"profile of {name}")
    n = comm.world_size
    started = time.perf_counter()
    for size_bytes in COLLECTIVE_BYTES:
        rows = max(n, size_bytes // 4 // 16)
        shares = [2.0 if r % 2 == 0 else 1.0 for r in range(n)]
        sizes = split(rows, shares)
        run = collective_call(name, channel, comm, rows, sizes)
        run()
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            times.append(Meter.wall(run))
        worst = torch.tensor(times, dtype=torch.float64, device=comm.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        points.append((rows * 16 * 4, statistics.median(worst.tolist())))
        over = torch.tensor(time.perf_counter() - started > budget_s, dtype=torch.int32, device=comm.device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over:
            break
    latency, slope = Curve(tuple(points)).affine
    return CollectiveFit(latency, slope)


def split(rows: int, shares: list[float]) -> tuple[int, ...]:
    return shard_sizes(rows, make_ratio(shares))


def collective_call(name: str, channel, comm: Comm, rows: int, sizes: tuple[int, ...]):
    mine = sizes[comm.rank]
    whole = torch.ones(rows, 16, device=comm.device)
    piece = whole[:mine].clone()
    match name:
        case "all_reduce":
            return lambda: collectives.all_reduce(channel, whole)
        case "all_gather":
            return lambda: collectives.all_gather(channel, piece, sizes)
        case "reduce_scatter":
            return lambda: collectives.reduce_scatter(channel, whole, sizes)
        case "all_to_all":
            columns = split(16, [1.0] * comm.world_size)
            return lambda: collectives.all_to_all(channel, piece, 0, sizes, 1, columns)
    raise ValueError(name)
