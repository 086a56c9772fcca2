"""Texts that come with a plan: the reason why nothing fits, warnings, comments."""

from __future__ import annotations

from collections.abc import Iterator

from ..base.units import ranks_text, size_text
from ..cost.calls import is_computation
from ..cost.communicators import DATA, Communicator
from ..cost.exchanges import exchange_of
from ..cost.placed import Sheet
from ..errors import Infeasible
from ..frontend.job import ELEMENTWISE
from ..lang.ir import Graph, Program, local_bytes, local_shape
from ..lang.rules import RULES
from .proposal import Proposal
from .task import Task


def check_memory(task: Task) -> None:
    """Raises Infeasible if a device's memory is too small for a process that holds no part of the model: then
    no share, not even an empty one, would fit there."""
    # the communicator through which every rank gets the model's values
    values = (Communicator(DATA, tuple(range(task.world_size))),)
    idle = task.costs.memory_constants_bytes(values[task.world_size == 1 :], working=())
    small = [rank for rank, size in enumerate(idle) if size > task.usable_bytes[rank]]
    if not small:
        return
    rank = min(small, key=task.usable_bytes.__getitem__)
    ranks = ranks_text(small)
    hint = f"a cluster file without {ranks}, too small for a process that holds nothing"
    if len(small) == task.world_size:
        nowhere = f"does not fit on {ranks}" if len(small) == 1 else f"fits on none of {ranks}"
        hint = f"devices with more memory: a process that holds nothing {nowhere}"
    raise Infeasible(
        "no plan fits in memory",
        expected=f"at least {size_text(idle[rank])} usable on rank {rank}, for its process alone",
        got=f"{size_text(task.usable_bytes[rank])} usable there ({task.costs.cluster.devices[rank].name})",
        hint=hint,
    )


def infeasible(task: Task, proposals: list[Proposal]) -> Infeasible:
    """The reason why nothing fits, based on the candidate that comes closest."""

    def excess(p: Proposal) -> tuple[float, int]:
        over = [(peak - task.usable_bytes[rank], rank) for rank, peak in enumerate(p.peak_memory_bytes)]
        return max(over)

    closest = min(proposals, key=lambda p: excess(p)[0])
    over, rank = excess(closest)
    device = task.costs.cluster.devices[rank]
    peak = closest.peak_memory_bytes[rank]
    if over <= 0 and (parting := task.parting(closest.program)):
        return Infeasible(
            f"the {closest.planner} plan {parting}, and the job's optimizer steps whole ones only",
            expected="a plan that keeps all parameters whole on every rank that computes, or an optimizer "
            "that works element by element: "
            + ", ".join(ELEMENTWISE)
            + ", or a class of your own whose step "
            "comes out alike on pieces of small tensors, where it is tried",
            hint=('planner="auto"', 'planner="ddp-proportional"'),
        )
    if over <= 0:
        return Infeasible(
            f"the {closest.planner} plan sends values between ranks that compute them in different dtypes",
            expected="a plan whose ranks compute their own samples",
            got=", ".join(f"{name} as {' '.join(row)}" for name, row in task.dtypes),
            hint='planner="auto"',
        )
    constant = closest.simulation.memory.constants(closest.program)[rank]
    # a larger device keeps as large a part free, and the three digits that are shown may round down
    more = 1.005 * over * device.memory_bytes / task.usable_bytes[rank]
    hint = ("a smaller global batch in the job", f"a device with at least {size_text(more)} more memory")
    if constant > task.usable_bytes[rank]:  # no batch is small enough
        without = f"a cluster file without rank {rank}, too small for the process alone"
        hint = (*((without,) if task.world_size > 1 else ()), hint[1])
    if rank not in closest.program.working_ranks:  # an idle rank still receives the initial values
        hint = (f"a cluster file without rank {rank}, which takes no part and is too small even so", hint[1])
    name, size = largest_tensor(closest.program, rank)
    return Infeasible(
        "no plan fits in memory",
        expected=f"at most {size_text(task.usable_bytes[rank])} usable on rank {rank} ({device.name})",
        got=f"{size_text(peak)} needed there by {closest.planner}, the candidate that comes closest; "
        f"{size_text(constant)} of it are the process itself; "
        + (f"largest tensor %{name}, {size_text(size)}" if size else "the model's initial values pass by it"),
        hint=hint,
    )


def largest_tensor(program: Program, rank: int) -> tuple[str, int]:
    sizes = {
        name: local_bytes(t.value, t.placement, program.ratio(t.ratio), rank)
        for name, t in program.types.items()
    }
    name = max(sizes, key=sizes.__getitem__)
    return name, sizes[name]


def warnings_of(graph: Graph, program: Program) -> Iterator[str]:
    seen: set[str] = set()
    for node in graph.nodes:
        if node.is_leaf or node.is_sink or node.op in RULES or node.op in seen:
            continue
        seen.add(node.op)
        place = f" ({node.location}{', ' + node.source if node.source else ''})" if node.location else ""
        yield f"no sharding rule for {node.op}{place}; it runs replicated on every device"
    if idle := sorted(set(range(program.world_size)) - set(program.working_ranks)):
        take, them = ("takes", "it") if len(idle) == 1 else ("take", "them")
        yield f"{ranks_text(idle)} {take} no part: the step is faster without {them}"


def dtype_warnings(task: Task, program: Program) -> Iterator[str]:
    """Yields a warning for ranks without bf16, with the dtype that they use instead."""
    devices = task.costs.cluster.devices
    without = [r for r, d in enumerate(devices) if not (d.supports_bf16 or d.kind == "cpu")]
    ranks = ", ".join(map(str, without))
    for name, row in program.dtypes:
        instead = row[without[0]]
        yield (
            f"ranks {ranks} have no {name} and compute it in {instead}: scale the loss "
            "(Job(..., scaler=...), or mixmesh.GradScaler in a loop of your own)"
        )
    if not program.dtypes and without and any(t.dtype == "bf16" for t in task.graph.types.values()):
        yield f"ranks {ranks} have no bf16, and no other dtype can stand in: it is emulated there"


def notes_of(program: Program, sheet: Sheet) -> dict[int, str]:
    """Comments for the printed program: local sizes of inputs, times of operators and collectives."""
    costs, notes = sheet.costs, {}
    slowest: dict[int, float] = {}  # the longest seconds of each work
    for n, i in enumerate(program.instructions):
        if i.op == "input":
            shapes = [
                local_shape(i.type.value, i.type.placement, program.ratio(i.type.ratio), r)
                for r in range(program.world_size)
            ]
            notes[n] = "local " + " ".join(str(s[0]) if s else "-" for s in shapes)
        elif is_computation(i):
            work = sheet.works[sheet.work_of[n]]
            if sheet.work_of[n] not in slowest:
                shares = {
                    (costs.class_of[r], share)
                    for r, share in enumerate(sheet.shares(work.cut, program))
                    if share
                }
                slowest[sheet.work_of[n]] = max(
                    (work.times[c].forward.at(share) for c, share in shares), default=0.0
                )
            if slowest[sheet.work_of[n]] >= 5e-6:
                notes[n] = f"{slowest[sheet.work_of[n]] * 1e3:8.3f} ms"
        else:
            exchange = exchange_of(program, i)
            if exchange is not None:
                notes[n] = f"{exchange.seconds(costs) * 1e3:8.3f} ms"
    return notes
