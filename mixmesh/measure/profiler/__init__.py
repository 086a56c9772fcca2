"""Measures a job's operators on this rank's device, and the collectives between all ranks.

Every distinct operator of the job's graph runs forward and backward on shards of a few sizes around the
device's likely share. A device under a CPU quota runs short bursts at full speed and then stands still, so
single operators are timed by the CPU time of their thread. The real time of whole steps, measured at three
moments of a profile with two batch sizes, turns these into seconds (``step_scale``).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...cluster import Cluster, Device
from ...cluster.device import HEADROOM
from ...cost import CostModel, DeviceProfile, Profile, device_key, links_fingerprint
from ...cost.tf32 import PROFILED, state_of
from ...frontend.job import batch_size, optimizer_states
from ...frontend.trace.autocast import Autocast
from ...frontend.trace.tf32 import tf32_now
from ...lang.ir import Graph, Program
from ...runtime.accelerator import backend_of, indexed, is_accelerator
from ...runtime.allocator import HeapLimit, heap_with_free, steady_heap
from ...runtime.comm import Comm, default_device
from ...runtime.first_rank import everyones
from ...runtime.messages import meet
from ...runtime.segments import check_can_compile
from .constants import KeptProcess, ProcessMemory, gpu_process_memory, own_process_memory
from .joins import measure_joins
from .limit import EARLY_STEPS, LINKS, OPERATORS, OPERATORS_LEAST, PROCESS, WITHIN, Limit
from .links import link_sets, measure_links
from .meter import Meter
from .micro_batches import Largest, largest_micro_batches
from .operators import left_in_heap_bytes, measure_ops, shares_to_measure
from .overhead import measure_overhead
from .overlap import measure_overlap
from .rest import measure_rest
from .steps import FACTORS, STEPS_SHARE, LocalSteps, kept_state
from .within import measure_within

LINKS_SHARE = 0.27  # share of the budget for links; computing beside transfers has seconds of its own


def profile(
    graph: Graph,
    job: Any,
    cluster: Cluster,
    *,
    budget_s: float = 60.0,
    program: Program | None = None,
    device: torch.device | str | None = None,
    compiles: bool = False,
    on_start: Callable[[], object] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
    kept_process: KeptProcess | None = None,
    autocast: Autocast | None = None,
) -> Profile:
    """The profile of ``job`` on the cluster of which this process is a rank. Collective.

    Every rank measures its own device at the same time, as in training; among equal devices the median
    counts. The budget is wall-clock time (``limit``): anything not measured in time is estimated, and the
    provenance names the operators concerned. ``kept_process`` knows what an earlier profile measured of a
    process without tensors. If ``program`` is given, the job's data parallelism with even shares, each
    device's largest micro-batches are confirmed first, outside the budget; ``torch.distributed`` must not be
    initialised then. For a job that ``compiles``, whole steps are those of the compiled model, also outside
    the budget; raises InputError if there is no compiler. Whole steps call the model under ``autocast``, as
    its graph was traced.
    """
    steady_heap()  # as in a training without room to spare
    largest = confirmed(job, cluster, program, device, progress) if program else None
    started = time.perf_counter()
    comm = Comm.of_sets(cluster.world_size, link_sets(cluster), device=device)
    if compiles:
        check_can_compile(comm.device)
    limit = Limit(comm, budget_s, started)
    progress("memory of a process without tensors")
    idle, working, communicator = constant_memory(comm, cluster, limit.left_s(PROCESS), kept_process)
    on_start()
    declared = cluster.devices[comm.rank]
    heap = heap_limit(comm.device, declared)
    heap.keeps_everything()
    meet()
    meter = Meter(comm.device, emulated=os.environ.get("MIXMESH_EMULATION") == "quota")
    links_started = time.perf_counter()
    links = measure_links(
        comm, cluster, budget_s * LINKS_SHARE, most_s=limit.left_s(LINKS), progress=progress
    )
    progress("links beside computing")
    overlap = measure_overlap(comm, links, limit)
    overhead_s = measure_overhead(comm, overlap.host_s, limit)
    joins = measure_joins(comm.device, limit) if comm.world_size > 1 else ()
    progress("computing after a rest")
    rest = measure_rest(comm.device, limit)
    links_s = time.perf_counter() - links_started
    share = share_within(likely_share(cluster, comm.rank), job, largest)
    window_s = budget_s * STEPS_SHARE / len(FACTORS)
    with kept_state(job.model):
        local = LocalSteps(
            job, share, meter, declared.memory_bytes, heap=heap, compiles=compiles, autocast=autocast
        )
        progress("whole steps")
        # a GPU has the memory for its operators first, and a pace of its own
        is_early = comm.device.type == "cpu" and not compiles
        if is_early:
            local.window(0, window_s, limit, EARLY_STEPS)
        progress("operators")
        # links that are slower than expected must not use up the operators' time
        deadline = time.perf_counter() + max(limit.left_s(OPERATORS), budget_s * OPERATORS_LEAST)
        shares = shares_to_measure(share, comm.world_size)
        with heap_of_a_step(heap, graph, share):
            ops, skipped = measure_ops(graph, shares, meter, comm.device, declared, deadline, progress)
        progress("whole steps")
        for number in range(int(is_early), 2):
            local.window(number, window_s, limit)
        within = measure_within(comm, job, local.samples, meter, overlap.host_s, joins, limit, autocast)
        local.window(2, window_s, limit, WITHIN)
    own = device_key(declared)
    # devices lend each other operators in these costs as in those that plan
    lenders = {key: DeviceProfile(others, 0.0, 0) for key, others in everyones((own, ops))}
    costs = CostModel(cluster, Profile(lenders | {own: DeviceProfile(ops, 0.0, 0)}, ()), tf32=tf32_now())
    steps = local.found(graph, costs, costs.class_of[comm.rank])
    if within.optimizer_s_per_byte is None:
        optimizer_s = CostModel(cluster).optimizer_s(comm.rank, 1.0)
        skipped.append("whole steps, for which there is no memory, or there are no values")
    else:
        optimizer_s = steps.host_scale * within.optimizer_s_per_byte
    if largest is not None and largest.excess_bytes is not None:
        working = round(idle + max(largest.excess_bytes, 0))
    samples = largest.samples if largest is not None else ()
    mine = DeviceProfile(
        ops,
        optimizer_s,
        working,
        steps.scale,
        overlap.slowdown,
        overlap.host_s,
        steps.host_scale,
        idle,
        samples,
        *rest,
        overlap.beside_s,
        communicator,
        within.join_s,
        within.cold,
        overlap.redistribution_s,
        overhead_s,
    )
    measured = everyones((own, mine, skipped, steps.sample_s))
    devices = {}
    for key in dict.fromkeys(k for k, *_ in measured):
        devices[key] = merge([(p, sample_s) for k, p, _, sample_s in measured if k == key])
    provenance = {
        **provenance_of(graph, cluster, comm, links_s, time.perf_counter() - started),
        "compiled": compiles,
        "skipped": sorted({op for _, _, names, _ in measured for op in names}),
    }
    comm.close()
    return Profile(devices, links, provenance)


def heap_limit(device: torch.device, declared: Device) -> HeapLimit:
    """The limit of this process's heap: it keeps everything while the process holds no more than a plan may
    need under which a training keeps everything."""
    return HeapLimit.of_plan(0, (1 - HEADROOM) * declared.memory_bytes if device.type == "cpu" else 0)


def heap_of_a_step(heap: HeapLimit, graph: Graph, share: float) -> AbstractContextManager[None]:
    """A context in which the heap is as free as a step with this share of the batch leaves it."""
    return heap_with_free(0 if heap.keeps_everything() else left_in_heap_bytes(graph, share))


def profile_links(
    graph: Graph,
    cluster: Cluster,
    devices: dict[str, DeviceProfile],
    *,
    budget_s: float = 60.0,
    on_start: Callable[[], object] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """The profile of a job on the cluster of which this process is a rank, if its ``devices`` are already
    known: only the collectives are measured, for their part of ``budget_s``. Collective."""
    comm = Comm.of_sets(cluster.world_size, link_sets(cluster))
    on_start()
    declared = cluster.devices[comm.rank]
    heap = heap_limit(comm.device, declared)
    heap.keeps_everything()
    meet()
    started = time.perf_counter()
    links = measure_links(comm, cluster, budget_s * LINKS_SHARE, most_s=budget_s * LINKS, progress=progress)
    links_s = time.perf_counter() - started
    provenance = {
        **provenance_of(graph, cluster, comm, links_s, links_s),
        "devices_kept": sorted(devices),
    }
    comm.close()
    return Profile(devices, links, provenance)


def provenance_of(
    graph: Graph, cluster: Cluster, comm: Comm, links_s: float, took_s: float
) -> dict[str, str | int | float | list[str]]:
    """A profile's provenance: the versions, job and settings that it was measured with."""
    tf32 = {PROFILED: state_of(tf32_now())} if is_accelerator(comm.device) else {}
    return {
        **tf32,
        "torch": torch.__version__,
        "cluster": cluster.fingerprint,
        "cluster_name": cluster.name,
        "links": links_fingerprint(cluster),
        "backend": backend_of(),
        "links_seconds": round(links_s, 1),
        "graph": graph.fingerprint,
        "device_type": comm.device.type,
        "emulation": os.environ.get("MIXMESH_EMULATION", "none: real devices"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(took_s, 1),
    }


def confirmed(
    job: Any,
    cluster: Cluster,
    program: Program,
    device: torch.device | str | None,
    progress: Callable[[str], None],
) -> Largest:
    """The largest micro-batches confirmed on this process's device, up to the largest share that is
    measured."""
    rank = int(os.environ.get("RANK", "0"))
    share = likely_share(cluster, rank)
    return largest_micro_batches(
        job,
        program,
        CostModel(cluster),
        rank,
        device=indexed(device) if device is not None else default_device(),
        optimizer_states=optimizer_states(job.optimizer, job.model),
        largest_share=shares_to_measure(share, cluster.world_size)[-1],
        progress=progress,
    )


def constant_memory(
    comm: Comm, cluster: Cluster, most_s: float, kept: KeptProcess | None = None
) -> ProcessMemory:
    """Bytes of device memory that processes hold before any tensor. Collective.

    On a CPU the first rank of every machine measures them for the others, which run the same libraries, or
    takes them from ``kept``; if that takes more than ``most_s`` seconds they are estimated.
    """
    if comm.device.type != "cpu":
        return gpu_process_memory(comm.channel(comm.everyone, "profile of memory"))
    machine = cluster.machine_index_of(comm.rank)
    first = comm.rank == cluster.ranks_of(machine)[0]
    of_all = everyones((machine, own_process_memory(most_s, kept) if first else None))
    costs = CostModel(cluster)
    estimate = ProcessMemory(
        costs.memory_constant_bytes(comm.rank, idle=True), costs.memory_constant_bytes(comm.rank)
    )
    return next((memory for there, memory in of_all if there == machine and memory is not None), estimate)


def merge(profiles: Sequence[tuple[DeviceProfile, float]]) -> DeviceProfile:
    """Merges the profiles of equal devices, each with its seconds for a sample, into the one with the median
    of these; for two devices into that of the slower, for which the other waits."""
    return sorted(profiles, key=lambda pair: pair[1])[len(profiles) // 2][0]


def likely_share(cluster: Cluster, rank: int) -> float:
    """A device's share of the batch if shares follow the declared speeds."""
    return cluster.devices[rank].flop_per_s / sum(d.flop_per_s for d in cluster.devices)


def share_within(share: float, job: Any, largest: Largest | None) -> float:
    """This share of the batch, or that of the ``largest`` confirmed micro-batch if it is smaller."""
    if largest is None:
        return share
    size = batch_size(job.batch)
    assert size is not None  # micro-batches were cut from a batch with a size
    return min(share, max(largest.samples[0], 1) / size)
