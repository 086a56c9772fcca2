"""Checkpoints of four unequal devices under pipelines, two levels and ZeRO-3, gone on with
under another plan of these, by three devices, by five in two machines and by one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world, shared_folder
from pipelines import BATCH, batch, cut_into, model_of, pipelined
from programs import make_plan
from test_two_level import DEVICE, cut_within_machines

from mixmesh import checkpoint
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio
from mixmesh.lang.plan_file import Plan
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.parallel import ParallelModel, parallelize
from mixmesh.search.baselines import data_parallel

FASTER, SLOWER = DEVICE.format(6e-6), DEVICE.format(3e-6)
NETWORK = "[network]\nbandwidth_gbit_per_s = 1\nlatency_us = 1\n"
MACHINES = {
    3: ([FASTER, SLOWER, SLOWER],),
    4: ([FASTER, SLOWER], [SLOWER, SLOWER]),
    5: ([FASTER, SLOWER], [FASTER, SLOWER, SLOWER]),
}
# stages of samples by rank: two samples of a micro-batch to the faster device of a stage, one to the slower
STAGES = {
    3: ((2, 1, 0), (0, 0, 1)),
    4: ((1, 0, 0, 0), (0, 2, 1, 0), (0, 0, 0, 1)),
    5: ((2, 1, 0, 0, 0), (0, 0, 2, 1, 0), (0, 0, 0, 0, 1)),
}
PLANS = {3: ("pipeline", "zero_3"), 4: ("pipeline", "two_level", "zero_3"), 5: ("pipeline", "two_level")}
SAVED_STEP, END = 2, 4


def plan_of(kind: str, world_size: int) -> Plan:
    """A plan of that kind, in which every rank has other pieces than another."""
    head = "[[machine]]\nlink_latency_us = 1\n"
    parts = [f"{head}devices = [{', '.join(devices)}]\n" for devices in MACHINES[world_size]]
    cluster = Cluster.parse(f'name = "of {world_size}"\n{NETWORK}' + "".join(parts))
    graph, costs = trace(model_of(), batch()).graph, CostModel(cluster)
    if kind == "pipeline":
        return pipelined(cut_into(graph, STAGES[world_size], costs), 2, cluster)
    if kind == "two_level":
        program = cut_within_machines(graph, cluster)
        assert program.copies
    else:
        shares = make_ratio(range(world_size, 0, -1))
        program = with_stage(data_parallel(graph, costs, shares), 3, make_ratio(range(1, world_size + 1)))
    return make_plan(program, cluster)


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def begin(kind: str) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The model in parallel and its optimizer, with other values than those that were trained."""
    model = model_of(seed=1)
    plan = Plan.load(file_of(kind, dist.get_world_size()))
    return parallelize(model, adamw(model.parameters()), plan, device="cpu", timeout_s=60, check_model=False)


def train(model, optimizer, steps) -> list[float]:
    losses = []
    for step in steps:
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def expected_losses() -> list[float]:
    """The losses on one device."""
    model = model_of()
    return train(model, adamw(model.parameters()), range(END))


def expect_rest(losses: list[float], steps: range, what: str = "") -> None:
    expected = torch.tensor(expected_losses()[steps.start : steps.stop], dtype=torch.float64)
    got = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")


def folder_of(kind: str) -> Path:
    return Path(os.environ["SAVED"]) / kind


def file_of(kind: str, world_size: int) -> Path:
    return Path(os.environ["SAVED"]) / f"{kind}-{world_size}.plan"


class Saves:
    """Four devices train two steps, save at once and beside the training, and go on from both to the last
    digit under the same plan."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, _) -> None:
        model, optimizer = begin(self.kind)
        model.load_full_state_dict(model_of().state_dict())
        expect_rest(train(model, optimizer, range(SAVED_STEP)), range(SAVED_STEP), self.kind)
        kept = {"step": SAVED_STEP, "model": model, "optimizer": optimizer}
        assert checkpoint.save(folder_of(self.kind), **kept)
        behind = checkpoint.save_async(shared_folder(), **kept)
        rest = train(model, optimizer, range(SAVED_STEP, END))
        for folder in (folder_of(self.kind), behind.result().parent):
            again, resumed = begin(self.kind)
            assert checkpoint.load(folder, model=again, optimizer=resumed).step == SAVED_STEP
            assert train(again, resumed, range(SAVED_STEP, END)) == rest


def expect_weights_alike(folder: Path, kind: str, model: ParallelModel) -> None:
    """The weights of ``model`` in another one as well, by way of what ``export`` writes."""
    exported = shared_folder()
    if dist.get_rank() == 0:
        checkpoint.export(folder, exported)
    dist.barrier()
    other, _ = begin(kind)
    checkpoint.load_weights(other, exported)
    whole, its = model.full_state_dict(), other.full_state_dict()
    assert whole.keys() == its.keys() and all(torch.equal(x, its[name]) for name, x in whole.items())


class GoesOn:
    """What four devices saved under ``saved`` is gone on with under ``kind``."""

    def __init__(self, saved: str, kind: str) -> None:
        self.saved, self.kind = saved, kind

    def __call__(self, _) -> None:
        what = f"{self.saved} -> {self.kind} of {dist.get_world_size()}"
        model, optimizer = begin(self.kind)
        assert checkpoint.load(folder_of(self.saved), model=model, optimizer=optimizer).step == SAVED_STEP
        expect_weights_alike(folder_of(self.saved), self.kind, model)
        rest = range(SAVED_STEP, END)
        expect_rest(train(model, optimizer, rest), rest, what)


KINDS = PLANS[4]
CHECKS = {
    4: {f"saves {kind}": Saves(kind) for kind in KINDS}
    | {f"{a} -> {b}": GoesOn(a, b) for a, b in zip(KINDS, (*KINDS[1:], KINDS[0]))},
    3: {f"{a} -> {b}": GoesOn(a, b) for a, b in zip(KINDS, (*PLANS[3], "pipeline"))},
    5: {f"{a} -> {b}": GoesOn(a, b) for a, b in zip(KINDS, (*PLANS[5], "pipeline"))},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcomes of all worlds, one world after the other: four devices save first."""
    os.environ["SAVED"] = str(tmp_path_factory.mktemp("saved"))
    for size, kinds in PLANS.items():
        for kind in kinds:
            plan_of(kind, size).save(file_of(kind, size))
    join = {size: partial(initialise, size, torch.device("cpu"), 60) for size in CHECKS}
    return {size: run_world(size, checks, join[size]) for size, checks in CHECKS.items()}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CHECKS for name in CHECKS[size]])
def test_goes_on(outcomes, size, name):
    assert_passed(outcomes[size][name])


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_goes_on(outcomes, kind):
    model = model_of(seed=1)
    optimizer = adamw(model.parameters())
    assert checkpoint.load(folder_of(kind), model=model, optimizer=optimizer).step == SAVED_STEP
    expect_rest(train(model, optimizer, range(SAVED_STEP, END)), range(SAVED_STEP, END), kind)


def test_the_samples_can_be_dealt_out():
    assert all(BATCH % (2 * sum(stage)) == 0 for stages in STAGES.values() for stage in stages)
