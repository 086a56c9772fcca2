"""Poplar as a planner: allocations on clusters whose memory, compute or both differ, proved and judged."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from gloo_world import assert_passed, run_world
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cluster.device import HEADROOM
from mixmesh.cost import CostModel
from mixmesh.cost.gpu_memory import KERNEL_BYTES, MIB, workspace_bytes
from mixmesh.errors import Infeasible
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio, support
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.measure.verification import verify
from mixmesh.passes.zero import zero_stage
from mixmesh.planner import make_plan
from mixmesh.planner import poplar as poplar_module
from mixmesh.planner.budget import AMPLE, AUTO
from mixmesh.planner.poplar import Staged, poplar
from mixmesh.planner.task import HOPEFUL, Task
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.ratios import with_ratio
from mixmesh.simulator import simulate
from tests.support.small_devices import free_communicators, memory_gib  # noqa: F401

BATCH, TIME, WIDTH = 12, 128, 256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids, labels):
        h = self.table(ids)
        h = h + self.down(nn.functional.gelu(self.up(h)))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


def job():
    torch.manual_seed(0)
    ids = torch.randint(50, (BATCH, TIME))
    return Model(), {"ids": ids, "labels": torch.where(torch.rand(BATCH, TIME) < 0.3, -100, ids)}


@cache
def traced():
    return trace(*job())


def cluster(*devices: tuple[float, float], gbit_per_s: float = 10) -> Cluster:
    """Devices of (GFLOP/s, MiB beside the process), one per machine."""
    machines = []
    for n, (speed, room) in enumerate(devices):
        gib = memory_gib(room)
        figures = f"tflop_per_s = {speed / 1e3}, memory_gbyte_per_s = {speed / 10}, memory_gib = {gib}"
        machines.append(
            f'[[machine]]\nname = "m{n}"\ndevices = [{{ name = "d{speed:g}-{room:g}", {figures} }}]'
        )
    network = f"[network]\nbandwidth_gbit_per_s = {gbit_per_s}\nlatency_us = 20\n"
    return Cluster.parse(f'name = "few"\n{network}' + "\n".join(machines))


CLUSTERS = {
    "memory": cluster((100, 24), (100, 10), (100, 10)),
    "compute": cluster((160, 12), (80, 12), (40, 12)),
    "both": cluster((160, 20), (160, 8), (40, 12)),
}


def task_of(where: Cluster) -> Task:
    return Task(traced().graph, CostModel(where), ADAM, lambda _: None)


def proposals(where: Cluster, stage: int):
    task = task_of(where)
    return [p for p in Staged(task, stage, tuple(range(task.world_size))).proposals() if p.feasible]


def plan_of(proposal, where: Cluster) -> Plan:
    return Plan(
        program=proposal.program,
        planner="poplar",
        predicted_step_s=proposal.timeline.step_s,
        predicted_peak_memory_bytes=proposal.timeline.peak_memory_bytes,
        cluster_fingerprint=where.fingerprint,
        graph_fingerprint=traced().graph.fingerprint,
        micro_batches=proposal.micro_batches,
    )


def splits(samples: int) -> list[MicroBatch]:
    """Every way to take so many samples in equal micro-batches and a last one that is no larger."""
    if not samples:
        return [MicroBatch(0, 0, 0)]
    return [
        MicroBatch(m, steps, samples - (steps - 1) * m)
        for m in range(1, samples + 1)
        for steps in range(1, samples + 2)
        if 0 <= samples - (steps - 1) * m <= m
    ]


def test_sets_of_devices_share_the_programs_of_a_stage():
    task = task_of(CLUSTERS["both"])
    for stage in (1, 2, 3):
        pair, every = Staged(task, stage, (0, 2)), Staged(task, stage, (0, 1, 2))
        assert pair.program.body is every.program.body
        assert pair.program.ratios != every.program.ratios


def test_with_a_short_budget_lost_programs_are_not_examined(monkeypatch):
    """Programs far slower than the best so far get neither buckets nor memory, and no set is tried twice."""
    judged: list[tuple] = []
    best_buckets = Task.best_buckets

    def noted(task, planner, program, *args):
        proposal = best_buckets(task, planner, program, *args)
        judged.append((proposal.timeline.step_s, task.best_s))
        return proposal

    monkeypatch.setattr(Task, "best_buckets", noted)
    for budget, is_pruned in ((AUTO, True), (AMPLE, False)):
        judged.clear()
        task = Task(traced().graph, CostModel(CLUSTERS["both"]), ADAM, lambda _: None, budget)
        fastest = min(p.timeline.step_s for p in poplar(task) if p.feasible)
        slow = [step_s for step_s, best_s in judged if step_s > HOPEFUL * best_s]
        assert not slow if is_pruned else slow
        assert fastest == pytest.approx(min(step_s for step_s, _ in judged), rel=0.05)


@pytest.mark.parametrize(
    "devices, is_examined",
    [
        pytest.param(((100, 1), (100, 1)), False, id="nothing fits"),
        pytest.param(((100, 40), (100, 40)), True, id="all fit"),
    ],
)
def test_no_stage_is_examined_where_not_even_the_least_memory_fits(devices, is_examined):
    said: list[str] = []
    found = list(poplar(Task(traced().graph, CostModel(cluster(*devices)), ADAM, said.append)))
    assert bool(said) == is_examined == any(p.feasible for p in found)
    assert found  # to say what comes closest


class OneTable(nn.Module):
    """A model that is nearly all one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4096, 512), nn.Linear(512, 4)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.table(ids).mean(1)), labels)


def test_a_large_parameter_may_fit_where_it_is_not_gathered():
    """In stage 3 the whole table is held beside its pieces; in stages 1 and 2 it is held once."""
    data = {"ids": torch.zeros(BATCH, 4, dtype=torch.long), "labels": torch.zeros(BATCH, dtype=torch.long)}
    where = cluster((100, 27), (100, 27))
    found = list(poplar(Task(trace(OneTable(), data).graph, CostModel(where), ADAM, lambda _: None)))
    assert {zero_stage(p.program) for p in found if p.feasible} <= {1, 2}
    assert any(p.feasible for p in found)


KERNELS_MIB = (KERNEL_BYTES + workspace_bytes("d")) / MIB  # not loaded by a process that computes nothing


def test_sets_without_a_device_that_must_take_part_are_not_examined(monkeypatch):
    """One without the memory for the initial values can neither compute nor take no part."""
    where = cluster((160, 40), (160, 40), (40, 0.5 - KERNELS_MIB))

    def stages() -> list[str]:
        said: list[str] = []
        assert not any(p.feasible for p in poplar(Task(traced().graph, CostModel(where), ADAM, said.append)))
        return said

    examined = stages()
    with pytest.raises(Infeasible, match="without rank 2"):
        make_plan(traced(), where)
    monkeypatch.setattr(poplar_module, "idle_ranks_fit", lambda *_: True)
    assert len(examined) < len(stages())


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_plan_for_devices_that_differ(name):
    where = CLUSTERS[name]
    plan = make_plan(traced(), where, planner="poplar")
    assert Plan.parse(str(plan)) == plan
    if plan.micro_batches is not None:  # else everyone takes its share at once
        assert sum(sum(m.sizes) for m in plan.micro_batches) == BATCH
    assert name == "memory" or plan.micro_batches is not None
    for peak, device in zip(plan.predicted_peak_memory_bytes, where.devices):
        assert peak <= device.memory_bytes * (1 - HEADROOM)
    again = simulate(plan.program, CostModel(where), micro_batches=plan.micro_batches)
    assert again.step_s == plan.predicted_step_s
    assert again.peak_memory_bytes == plan.predicted_peak_memory_bytes
    assert verify(*job(), plan, steps=2, traced=traced()).ok


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_trains_as_the_single_device(stage):
    found = proposals(CLUSTERS["compute"], stage)
    assert any(p.micro_batches is not None for p in found)
    for p in found:
        assert zero_stage(p.program) == stage
        report = verify(*job(), plan_of(p, CLUSTERS["compute"]), traced=traced())
        assert report.ok and report.max_gradient_error_f64 < 1e-9


def test_owners_hold_what_memory_allows():
    """The device with twice the room takes what the others have none for."""
    for stage in (1, 2, 3):
        best = min(proposals(CLUSTERS["memory"], stage), key=lambda p: p.key)
        largest, *others = best.program.ratio_of["z"]
        assert largest >= max(others) and abs(others[0] - others[1]) < 1e-5
    # the reverse of speed: where the fast device's room is taken by its samples
    best = min(proposals(cluster((160, 11), (40, 24)), 1), key=lambda p: p.key)
    (fast, slow), (more, less) = best.program.ratio_of["z"], best.program.ratio_of["r0"]
    assert more > less and slow > fast


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("gbit_per_s", (10, 1))
def test_no_allocation_is_faster_in_the_simulator(stage, gbit_per_s):
    """Against every allocation of the batch to two devices, under the same shares of owners."""
    where = cluster((160, 14), (50, 9), gbit_per_s=gbit_per_s)
    best = min(proposals(where, stage), key=lambda p: p.key)
    every = []
    for n in range(1, BATCH):
        program = with_ratio(best.program, "r0", make_ratio([n, BATCH - n]))
        for rows in itertools.product(splits(n), splits(BATCH - n)):
            in_step = stage == 1 or rows[0].steps == rows[1].steps
            if in_step and any(m.steps > 1 for m in rows):
                peaks = best.simulation.run(program, rows).peak_memory_bytes
                if all(p <= d.memory_bytes * (1 - HEADROOM) for p, d in zip(peaks, where.devices)):
                    every.append(best.simulation.step_s(program, rows))
    assert len(every) > 10
    assert best.timeline.step_s <= min(every) * (1 + 1e-9)


def test_a_share_of_zero():
    """A device that is too slow to help takes nothing, and what is left verifies."""
    plan = make_plan(traced(), cluster((160, 16), (120, 12), (0.5, 24)), planner="poplar")
    assert support(plan.program.ratio_of["r0"]) == (0, 1)
    assert plan.micro_batches is None or plan.micro_batches[2] == MicroBatch(0, 0, 0)
    assert verify(*job(), plan, traced=traced()).ok


def test_nothing_fits():
    with pytest.raises(Infeasible, match="no plan fits in memory") as caught:
        make_plan(traced(), cluster((100, 1), (100, 1)), planner="poplar")
    assert "poplar" in str(caught.value)


def test_auto_asks_it_where_nothing_else_fits_but_slow_pipelines():
    where = cluster((100, 12), (100, 12))
    plan = make_plan(traced(), where)
    assert plan.planner == "poplar" and any(m.steps > 1 for m in plan.micro_batches)
    assert not any(c.feasible for c in plan.candidates if c.planner not in ("poplar", "pipeline"))


class Trained:
    """Two steps of a plan in one of several processes, against the single device. Pickled."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, _) -> None:
        (single, batch), (mine, _) = job(), job()
        optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
        plan = Plan.parse(self.text)
        model, sharded = parallelize(
            mine, torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9), plan, device="cpu", timeout_s=60
        )
        for _step in range(2):
            for m, o in ((single, optimizer), (model, sharded)):
                o.zero_grad()
                m(**batch).backward()
                o.step()
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, single.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_between_processes():
    plan = make_plan(traced(), CLUSTERS["both"], planner="poplar")
    assert len({m.steps for m in plan.micro_batches}) > 1  # each its own count
    assert_passed(run_world(3, {"both": Trained(str(plan))})["both"])
