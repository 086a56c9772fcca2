"""The duration of planning, and its growth with layers, devices, experts and parallel branches.

Tracing is timed separately: it is PyTorch's own. The clusters mix four types of devices; beyond 64 of them a
machine holds eight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from mixmesh.cluster import Cluster
from mixmesh.cluster.catalogue import CATALOGUE
from mixmesh.errors import Infeasible, InputError
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner import make_plan

from .planning_models import branches, mixture, transformer

TYPES = ("A100-40GB", "V100-32GB", "RTX3090-24GB", "T4-16GB")
STEPS = ("search", "ratios", "simulate", "polish")
MODELS: dict[str, Callable[[int, int], Job]] = {
    "transformer": transformer,
    "mixture": mixture,
    "branches": branches,
}
SAMPLES_PER_DEVICE = 8


@dataclass(frozen=True)
class Case:
    """A model of ``size`` layers or branches on ``devices``, which have a part ``memory`` of their usual
    memory; ``most_s`` is the target, if there is one. ``most_times``: the target as a multiple of the time on
    8 devices."""

    model: str
    size: int
    devices: int
    memory: float = 1.0
    most_s: float | None = None
    most_times: float | None = None
    quick: bool = False


CASES = (
    Case("transformer", 6, 8, quick=True),
    Case("transformer", 12, 8),
    Case("transformer", 24, 8, most_s=0.6, quick=True),
    Case("transformer", 48, 8),
    Case("transformer", 96, 8, most_s=1.3),
    Case("transformer", 24, 4),
    Case("transformer", 24, 16),
    Case("transformer", 24, 64, most_times=3.0, quick=True),
    Case("transformer", 24, 256),
    Case("transformer", 24, 1024, most_s=1.4),
    Case("transformer", 24, 8, memory=0.3),
    Case("transformer", 24, 8, memory=0.15),
    Case("mixture", 24, 8, most_s=2.0),
    Case("branches", 1, 8, quick=True),
    Case("branches", 2, 8),
    Case("branches", 4, 8),
    Case("branches", 8, 8, most_s=1.0, quick=True),
)


@dataclass(frozen=True)
class Row:
    """Seconds of one case. ``total_s`` is all of planning except tracing, ``target_s`` its limit;
    ``predicted_step_s`` is None if nothing fits."""

    model: str
    size: int
    devices: int
    memory: float
    nodes: int
    trace_s: float
    search_s: float
    ratios_s: float
    simulate_s: float
    polish_s: float
    total_s: float
    cpu_s: float
    states_expanded: int
    gap: float | None
    planner: str | None
    predicted_step_s: float | None
    target_s: float | None

    @property
    def met(self) -> bool | None:
        return None if self.target_s is None else self.total_s <= self.target_s


def mixed_cluster(devices: int, memory: float = 1.0) -> Cluster:
    """``devices`` of four types on machines of two (up to 64) or eight, the types in equal parts. All have a
    part ``memory`` of what the catalogue says."""
    each = 2 if devices >= 8 else 1
    each = 8 if devices > 64 else each
    if devices % (each * len(TYPES)):
        raise InputError(
            f"{devices} devices cannot be shared among four types",
            expected=f"a multiple of {each * len(TYPES)}",
            got=str(devices),
        )
    machines = []
    for n in range(devices // each):
        name = TYPES[n % len(TYPES)]
        gib = memory * CATALOGUE[name].memory_gib
        machines.append(
            f'[[machine]]\ndevices = [{{ device = "{name}", memory_gib = {gib:g}, count = {each} }}]\n'
            "link_gbit_per_s = 100\n"
        )
    head = f'name = "mixed-{devices}"\n[network]\nbandwidth_gbit_per_s = 25\nlatency_us = 20\n'
    return Cluster.parse(head + "".join(machines))


def run(cases: Sequence[Case], progress: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """A row per case."""
    known: dict[tuple[str, int, int], float] = {}
    for case in cases:
        what = f"{case.model} {case.size} on {case.devices}, {case.memory:.0%} of memory"
        progress(f"{what}: tracing")
        job = MODELS[case.model](case.size, SAMPLES_PER_DEVICE * case.devices)
        started = time.perf_counter()
        traced = trace(job.model, job.batch)
        trace_s = time.perf_counter() - started
        progress(f"{what}: planning")
        on_eight = known.get((case.model, case.size, 8))
        target = case.most_s
        if case.most_times is not None and on_eight is not None:
            target = case.most_times * on_eight
        row = plan_case(case, traced, trace_s, target)
        if case.memory == 1:
            known[case.model, case.size, case.devices] = row.total_s
        yield row


def plan_case(case: Case, traced, trace_s: float, target_s: float | None) -> Row:
    cluster = mixed_cluster(case.devices, case.memory)
    started, cpu = time.perf_counter(), time.process_time()
    try:
        plan = make_plan(traced, cluster, optimizer_states=ADAM)
    except Infeasible:
        plan = None
    total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    spent = plan.timings_s if plan else {}
    return Row(
        model=case.model,
        size=case.size,
        devices=case.devices,
        memory=case.memory,
        nodes=len(traced.graph.nodes),
        trace_s=trace_s,
        **{f"{step}_s": spent.get(step, 0.0) for step in STEPS},
        total_s=total_s,
        cpu_s=cpu_s,
        states_expanded=plan.states_expanded if plan else 0,
        gap=plan.gap if plan else None,
        planner=plan.planner if plan else None,
        predicted_step_s=plan.predicted_step_s if plan else None,
        target_s=target_s,
    )


def report(rows: Sequence[Row], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    return {
        "bench": "planning",
        "command": command,
        "device_types": list(TYPES),
        "rows": [{**asdict(row), "met": row.met} for row in rows],
    }
