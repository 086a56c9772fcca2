"""Profiling devices with little memory: what does not fit is not measured, and nothing is killed for it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from gloo_world import assert_passed, run_world
from small_graphs import THREE, cluster, graph
from torch import nn

from benchmarks import jobs
from mixmesh.base.heap import KEPT_BYTES
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, moved_bytes
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Graph
from mixmesh.lang.rules import call_of
from mixmesh.measure import profiler
from mixmesh.measure.profiler import steps
from mixmesh.measure.profiler.children import Outcome
from mixmesh.measure.profiler.constants import KeptProcess, ProcessMemory, own_process_memory
from mixmesh.measure.profiler.limit import Limit
from mixmesh.measure.profiler.meter import Meter
from mixmesh.measure.profiler.operators import left_in_heap_bytes, measure_ops, sharded, share_bytes
from mixmesh.measure.profiler.steps import (
    FACTORS,
    FEW_STEPS,
    LEAST_STEPS,
    LocalSteps,
    Steps,
    Window,
    both_passes,
    fitting_count,
    kept_state,
    predicted_step_s,
    scales_of,
)
from mixmesh.measure.profiler.within import measure_within
from mixmesh.runtime import allocator
from mixmesh.runtime.comm import Comm, initialise

BODY = """\
%x = input("x") : f32[64, 32]
%w = param("w") : f32[16, 32]
%y = aten.linear(%x, %w) : f32[64, 16]
%s = aten.relu(%y) : f32[64, 16]
%loss = aten.mean(%s) : f32[]
return %loss"""
CPU = torch.device("cpu")


def test_what_is_cut_takes_a_part_and_the_rest_its_whole():
    made = graph(BODY, 1)
    call = next(call_of(n, made.types) for n in made.nodes if n.op == "aten.linear")
    x, w, y = (t.size_bytes for t in (*call.inputs, *call.outputs))
    by_cut = {s.inputs[0]: share_bytes(call, s, 0.25) for s in sharded(call)}
    assert sorted(by_cut.values()) == sorted([x / 4 + w + y / 4, x + w / 4 + y / 4, (x + w) / 4 + y])
    assert share_bytes(call, None, 0.25) == x + w + y == moved_bytes(call)


@pytest.mark.parametrize(("memory_bytes", "times"), [(2**50, 0), (2**20, len(FACTORS))])
def test_the_heap_is_shrunk_only_where_memory_is_scarce(monkeypatch, memory_bytes, times):
    """Steps on new pages are slower than those of a training."""
    shrunk = []
    monkeypatch.setattr(steps, "give_back", lambda: shrunk.append(1))
    monkeypatch.setattr(steps, "meet", lambda: None)
    whole = Job(Hungry(32), {"x": torch.randn(32, 8)}, optimizer=jobs.adamw)
    timed(whole, Meter(CPU, emulated=False), memory_bytes=memory_bytes)
    assert len(shrunk) == times


def test_a_window_that_something_has_slowed_does_not_count():
    windows = [(Window(8, real_s, real_s / 2), 1.0) for real_s in (1.0, 2.0, 1.1)]
    assert scales_of(windows, by_cpu=False) == (1.1, 1.0)
    assert scales_of(windows, by_cpu=True) == pytest.approx((1.1, 2.0))


def test_a_step_leaves_what_its_small_results_take():
    made = graph(BODY, 1)
    results = [n.types[0].size_bytes for n in made.nodes if n.op in ("aten.linear", "aten.relu", "aten.mean")]
    assert left_in_heap_bytes(made, 0.25) == round(sum(results) / 4)
    large = graph(BODY.replace("64", str(2**20)), 1)  # 64 MiB each
    assert left_in_heap_bytes(large, 1.0) == 4
    assert left_in_heap_bytes(large, 0.12) == 2 * round(2**26 * 0.12)
    more = "".join(f"%s{n} = aten.relu(%y) : f32[64, 16]\n" for n in range(6))
    deep = graph(BODY.replace("%loss", more + "%loss", 1).replace("64", str(2**20)))
    assert left_in_heap_bytes(deep, 0.12) == KEPT_BYTES


@pytest.mark.parametrize("memory_bytes", [2**20, 2**40])
def test_an_operator_without_room_is_left_to_its_class(memory_bytes):
    """A process holds more than a megabyte already."""
    device = replace(cluster(THREE).devices[0], memory_bytes=memory_bytes)
    made, deadline = graph(BODY, 1), time.perf_counter() + 60
    found, skipped = measure_ops(
        made, (0.25, 0.5), Meter(CPU, emulated=False), CPU, device, deadline, lambda _: None
    )
    assert (not found and len(skipped) == 3) if memory_bytes == 2**20 else (len(found) == 3 and not skipped)


class Hungry(torch.nn.Module):
    """Runs out of memory with more than ``most`` samples, as PyTorch's CPU allocator says it."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most = torch.nn.Linear(8, 8), most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return self.layer(x).square().mean()


class Counted(Hungry):
    """Counts its calls, but for those of another process."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def timed(job: Job, meter: Meter, *, budget_s: float = 0.0, limit: Limit | None = None, **how) -> LocalSteps:
    """The steps of a job with a share of a half, timed in every window of a profile."""
    local = LocalSteps(job, 0.5, meter, **how)
    for number in range(len(FACTORS)):
        local.window(number, budget_s, limit)
    return local


def in_costs(local: LocalSteps, made: Graph) -> Steps:
    return local.found(made, CostModel(cluster(THREE)), 0)


def steps_of(most: int, compiles: bool = False) -> tuple[Steps, list[int]]:
    """What was found, and the samples of each window."""
    batch = {"x": torch.randn(32, 8)}
    whole = Job(Hungry(32), batch, optimizer=jobs.adamw)
    made = trace(whole.model, batch).graph
    before = [p.clone() for p in whole.model.parameters()]
    whole.model.most = most
    meter = Meter(CPU, emulated=False)
    with kept_state(whole.model):
        local = timed(whole, meter, budget_s=0.05, compiles=compiles)
        comm = Comm(0, 1, CPU, 60.0, {})
        within = measure_within(comm, whole, local.samples, meter, {}, (), Limit.of(comm, 0.0))
    assert (within.optimizer_s_per_byte or 0) > 0 or not local.samples
    assert all(torch.equal(a, b) for a, b in zip(before, whole.model.parameters()))
    return in_costs(local, made), [w.samples for w in local.windows]


def enough(_) -> None:
    found, samples = steps_of(32)
    assert found.scale > 0 and samples == [round(32 * 0.5 * factor) for factor in FACTORS]


def halved(_) -> None:
    """5 samples fit: of 16 that are asked for 4 are measured, of 10 half as many."""
    found, samples = steps_of(5)
    assert found.scale > 0 and samples == [4, 5, 4]


class Normed(nn.Module):
    """Fails on one sample in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().mean()


def refused(_) -> None:
    """Of 2 samples that are measured first 0.6 are 1, which batch norm does not take."""
    local = timed(Job(Normed(), {"x": torch.randn(4, 8)}, optimizer=jobs.adamw), Meter(CPU, emulated=False))
    assert [w.samples for w in local.windows] == [2, 2, 2] and local.samples == 2


def few(_) -> None:
    """After the limit each window has a few steps."""
    comm = Comm(0, 1, CPU, 60.0, {})
    batch = {"x": torch.randn(32, 8)}
    whole = Job(Counted(32), batch, optimizer=jobs.adamw)
    made = trace(whole.model, batch).graph
    counts = []
    for limit in (None, Limit.of(comm, 0.0)):
        whole.model.calls = 0
        assert in_costs(timed(whole, Meter(CPU, emulated=False), limit=limit), made).scale > 0
        counts.append(whole.model.calls)
    assert counts == [1 + len(FACTORS) * (1 + steps) for steps in (LEAST_STEPS, FEW_STEPS)]


class Halting(Hungry):
    """Stands still for a while in each pass, as a process under a quota does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


def paused(_) -> None:
    """Pauses count in real seconds, and in the factor of CPU seconds only under a quota."""
    batch = {"x": torch.randn(32, 8)}
    whole = Job(Halting(32), batch, optimizer=jobs.adamw)
    made = trace(Hungry(32), batch).graph
    costs = CostModel(cluster(THREE))
    under_a_quota, without = (
        in_costs(timed(whole, Meter(CPU, emulated=emulated)), made) for emulated in (True, False)
    )
    assert without.host_scale == 1.0 < 2.0 < under_a_quota.host_scale
    least = 0.02 / predicted_step_s(made, costs, 0, 0.5)  # of the larger batch
    assert min(without.scale, under_a_quota.scale) > least


class Seen(Hungry):
    """Notes whether it is called under autocast."""

    def __init__(self) -> None:
        super().__init__(32)
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return super().forward(x).float()


def under_the_context_of_the_plan(_) -> None:
    batch = {"x": torch.randn(32, 8)}
    whole = Job(Seen(), batch, optimizer=jobs.adamw)
    for autocast in (("cpu", "bf16"), None):
        whole.model.seen.clear()
        timed(whole, Meter(CPU, emulated=False), autocast=autocast)
        assert set(whole.model.seen) == {autocast is not None}


def none(_) -> None:
    assert steps_of(0) == (Steps(), [])


def compiled(_) -> None:
    """Whole steps are those of the compiled model, if the job is compiled: for one size of a batch."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(inputs)
        return graph

    steps.compiled = partial(torch.compile, dynamic=False, backend=backend)
    for compiles in (False, True):
        found, _ = steps_of(32, compiles)
        assert found.scale > 0
        assert len(graphs) == int(compiles)


def operators_find_the_heap_of_a_step(_) -> None:
    """As much of it is free as a step with the device's share of the batch leaves, where the device has no
    room to keep everything."""
    alone = Cluster.parse('[[machine]]\nname = "a"\ndevices = [{ cpu_share = 1.0 }]\n')
    whole = Job(Hungry(32), {"x": torch.randn(32, 8)}, optimizer=jobs.adamw)
    made = trace(whole.model, whole.batch).graph
    sizes, trimmed = [], []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiler, "heap_with_free", lambda size: nullcontext(sizes.append(size)))
        patched.setattr(allocator, "set_limit", lambda number, size: trimmed.append((number, size)) or True)
        patched.setattr(allocator, "grows", lambda: True)
        profiler.profile(made, whole, alone, budget_s=1.0)
        assert sizes == [0] and (allocator.M_TRIM_THRESHOLD, allocator.NEVER) in trimmed
        patched.setattr(allocator.HeapLimit, "keeps_everything", lambda self: False)
        profiler.profile(made, whole, alone, budget_s=1.0)
    assert sizes == [0, left_in_heap_bytes(made, 1.0)] and sizes[1] > 0


CHECKS = {
    f.__name__: f
    for f in (
        enough,
        halved,
        refused,
        few,
        paused,
        under_the_context_of_the_plan,
        none,
        compiled,
        operators_find_the_heap_of_a_step,
    )
}


def begin() -> None:
    initialise(1, CPU, 60.0)


@pytest.fixture(scope="module")
def failures():
    return run_world(1, CHECKS, begin)


@pytest.mark.parametrize("check", CHECKS)
def test_whole_steps(failures, check):
    assert_passed(failures[check])


def test_a_process_is_measured_once_and_not_for_long():
    """What was kept is taken; what takes too long is left to the estimate."""
    kept: list[ProcessMemory] = []
    process = KeptProcess(lambda: kept[-1] if kept else None, kept.append)
    assert own_process_memory(0.0, process) is None and not kept
    memory = own_process_memory(100.0, process)
    assert memory is not None and 0 < memory.idle <= memory.working and kept == [memory]
    assert own_process_memory(0.0, process) == memory


@pytest.mark.parametrize(
    ("fits", "takes", "found"), [(9, 1, 8), (5, 1, 4), (0, 1, 0), (16, 16, 16), (15, 16, 0), (16, 8, 8)]
)
def test_a_step_is_timed_on_what_fits_and_the_model_takes(fits, takes, found):
    """8 of 16 rows are wanted; the model takes multiples of ``takes``."""

    def tried(count):
        if count % takes:
            return Outcome(error="RuntimeError: shapes", out_of_memory=False)
        return Outcome(error="killed", out_of_memory=True) if count > fits else Outcome()

    assert fitting_count(tried, 8, 16) == found


@pytest.mark.parametrize("shape", [lambda x: x, lambda x: (x.argmax(-1), x), lambda x: {"logits": x}])
def test_a_step_of_a_model_without_a_loss(shape):
    class Outputs(nn.Linear):
        def forward(self, x):
            return shape(super().forward(x))

    model = Outputs(4, 3)
    both_passes(model, (torch.randn(2, 4),), CPU, None)
    assert model.weight.grad is not None and model.bias.grad is not None
