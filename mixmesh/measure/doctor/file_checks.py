"""Checks a training's files, the cluster file and the plan, against the devices found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ...base.units import GIB, ranks_text, size_text
from ...cluster import Cluster
from ...cluster.detection.inventory import Inventory
from ...errors import InputError, PlanError
from ...frontend.trace import trace
from ...lang.check import check_plan
from ...lang.ir import print_program
from ...lang.plan_devices import PlannedDevice, planned_devices
from ...lang.plan_file import Plan, digest
from ...runtime import devices
from ...runtime.agreement import difference, outliers
from .ground import Ground

# share of a processor's memory that its kernel keeps, and of a card's that its driver keeps, so that both
# report less
MEMORY_TOLERANCE = devices.MEMORY_TOLERANCE


@dataclass(frozen=True)
class Misfit:
    """A rank whose device is not the one in a file."""

    rank: int
    expected: str
    got: str


def cluster_file(ground: Ground) -> str:
    """Checks that the devices are those of the cluster file, in number, names and memory."""
    path = ground.asked.cluster_file
    assert path is not None  # otherwise this check is left out
    text, _ = read_alike(ground, "cluster file", path, told_of_cluster)
    cluster = Cluster.parse(text, str(path))
    check_world(ground, cluster.world_size, path)
    ground.cluster = cluster  # links are compared with it even if a device differs
    planned = planned_devices(cluster)
    check_fits(misfits(planned, ground.inventory), path, _mend_cluster(planned, ground.inventory))
    check_order(ground, planned)
    return f"{cluster.world_size} devices as {path} has them"


def plan_file(ground: Ground) -> str:
    """Checks that all ranks have the same plan, that it belongs to the cluster file, if one is given, and
    that it fits the devices."""
    path = ground.asked.plan_file
    assert path is not None  # otherwise this check is left out
    text, without = read_alike(ground, "plan", path, told_of_plan)
    plan = Plan.parse(text, str(path))
    check_world(ground, plan.program.world_size, path)
    check_plan(plan, ground.cluster, where=str(path))
    hint = ("mixmesh plan JOB --cluster C.toml --out X.plan, C.toml being of these devices",)
    check_fits(misfits(plan.devices or (), ground.inventory), path, hint)
    check_order(ground, plan.devices)
    check_fits(too_large(plan, ground.inventory), path, hint)
    ground.plan = plan
    gets = f"; {ranks_text(without)}: not there, the first rank sends it" if without else ""
    return f"{plan.planner} for {plan.program.world_size} ranks{gets}"


def plan_of_job(ground: Ground) -> str:
    """Checks that the plan was made for the job's model."""

    def make() -> str:
        if ground.meeting.rank == 0:
            job, plan = ground.job, ground.plan
            names = dict.fromkeys(job.outputs)
            traced = trace(
                job.model, job.batch, batch_norm=plan.batch_norm, outputs=names, autocast=plan.autocast
            )
            check_plan(plan, graph=traced.graph, where=str(ground.asked.plan_file))
        return ""

    ground.meeting.gather_here("the tracing of the model", make)
    return "the plan is for this model and batch"


Told = tuple[str, str]  # (text of a file, a form of it that is equal for two files with the same meaning)


def told_of_cluster(path: Path) -> Told:
    """The text of a cluster file, and a digest of its meaning."""
    text = Cluster.load(path).to_toml()
    return text, f"digest {digest(text)}"


def told_of_plan(path: Path) -> Told:
    """The text of a plan file, and a digest of the parts that the start of a training compares, without the
    seconds of planning."""
    plan = Plan.load(path)
    compared = plan.micro_batches, plan.devices, plan.predicted_peak_memory_bytes
    fingerprint = digest(print_program(plan.program) + repr(compared))
    return str(plan), f"{plan.planner} for {plan.program.world_size} ranks, digest {fingerprint}"


def read_alike(ground: Ground, what: str, path: Path, read: Callable[[Path], Told]) -> tuple[str, list[int]]:
    """The text that the first rank reads from ``path``, and the ranks of machines without that file. Raises
    InputError if two ranks read different ones."""
    is_first = ground.meeting.rank == 0

    def make() -> Told | None:
        return read(path) if is_first or path.is_file() else None

    told = ground.meeting.gather(f"the reading of the {what}", make)
    digests = [(told[0] if one is None else one)[1] for one in told]
    if got := difference(digests):
        raise InputError(
            f"the ranks have another {what}: {ranks_text(list(outliers(digests)))}",
            expected=f"one {what} on all ranks, or the first one's where a machine has none",
            got=got,
            where=str(path),
            hint=f"scp {path} from the first machine to {_hosts(ground, outliers(digests))}",
            ranks=outliers(digests),
        )
    return told[0][0], [rank for rank, one in enumerate(told) if one is None]


def _hosts(ground: Ground, ranks: Sequence[int]) -> str:
    return ", ".join(sorted({ground.hosts[rank] for rank in ranks})) if ground.hosts else "the others"


def check_world(ground: Ground, planned: int, path: Path) -> None:
    """Raises InputError unless there is a process for every device of the file."""
    num_processes = ground.meeting.world_size
    if planned != num_processes:
        raise InputError(
            "the file is for another number of devices",
            expected=f"{planned} processes, one for each device of the file",
            got=f"{num_processes}",
            where=str(path),
            hint=(
                f"torchrun --nproc-per-node {planned} -m mixmesh doctor ... on one machine",
                "torchrun ... -m mixmesh detect --out C.toml writes a file of the devices that are there",
            ),
        )


def misfits(planned: Sequence[PlannedDevice], inventory: Inventory) -> list[Misfit]:
    """The ranks whose device is of another kind than planned, is another card, or has less memory."""
    wrong = []
    for rank, (plan, device) in enumerate(zip(planned, inventory.devices)):
        memory_bytes = inventory.memory_bytes(rank)
        description = f"{device.name} with {size_text(memory_bytes)} on host {device.host}"
        other_card = device.kind == "gpu" and not devices.may_be(plan.device, device)
        is_short = memory_bytes < plan.memory_bytes * (1 - MEMORY_TOLERANCE)
        if plan.kind != device.kind or other_card or is_short:
            sharing = sum(d.memory_pool == device.memory_pool for d in inventory.devices)
            shared = f", a part of what {sharing} ranks share" if is_short and sharing > 1 else ""
            kind = "" if plan.kind == device.kind else f", a {plan.kind.upper()}"
            wrong.append(Misfit(rank, f"{plan}{kind}", description + shared))
    return wrong


def too_large(plan: Plan, inventory: Inventory) -> list[Misfit]:
    """The ranks whose device has less memory than the plan needs."""
    peaks = list(enumerate(plan.predicted_peak_memory_bytes))
    return [
        Misfit(
            rank,
            f"{size_text(peak_bytes)} of memory, as the plan takes",
            size_text(inventory.memory_bytes(rank)),
        )
        for rank, peak_bytes in peaks
        if peak_bytes > inventory.memory_bytes(rank)
    ]


def check_fits(wrong: Sequence[Misfit], path: Path, hint: tuple[str, ...]) -> None:
    """Raises InputError that names every misfit."""
    if not wrong:
        return
    ranks = [misfit.rank for misfit in wrong]
    verb = "have" if len(ranks) > 1 else "has"
    raise InputError(
        f"{ranks_text(ranks)} {verb} another device than the file says, or one with less memory",
        expected="; ".join(f"rank {m.rank}: {m.expected}" for m in wrong),
        got="; ".join(f"rank {m.rank}: {m.got}" for m in wrong),
        where=str(path),
        hint=hint,
        ranks=tuple(ranks),
    )


def check_order(ground: Ground, planned: Sequence[PlannedDevice] | None) -> None:
    """Raises PlanError if the machines were started in another order than the file has them."""
    present = [devices.FoundDevice(d.host, d.kind, d.name, d.memory_bytes) for d in ground.devices]
    error: PlanError | None = devices.device_mismatch(planned, (), present)
    if error is not None:
        raise error


def _mend_cluster(planned: Sequence[PlannedDevice], inventory: Inventory) -> tuple[str, ...]:
    """The lines with which the file would match the devices."""
    machines = [name for name, _ in groupby(planned, key=lambda device: device.machine)]
    lines = []
    for rank in [misfit.rank for misfit in misfits(planned, inventory)]:
        device = planned[rank]
        if device.kind == inventory.devices[rank].kind:
            there_gib = inventory.memory_bytes(rank) // (GIB // 10) / 10
            place = f'device "{device.device}" of machine "{device.machine}"'
            lines.append(f"memory_gib = {there_gib:g} for {place} in the file, if that is what it has")
    order = f"start the machines in the order of the file: {', '.join(machines)}" if len(machines) > 1 else ""
    return (
        *lines,
        order,
        "or torchrun ... -m mixmesh detect --out C.toml: a file of the devices that are there",
    )
