"""Losses and gradients that are not finite: the instruction that is named, and what ``mixmesh run`` does."""

from __future__ import annotations

import inspect
import math
import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world, shared_folder
from pipelines import cut_into, pipelined
from programs import make_plan
from test_two_level import DEVICE, cut_within_machines
from torch import nn

import mixmesh
from mixmesh import checkpoint
from mixmesh.checkpoint.run import Every, RunCheckpoints, Settings
from mixmesh.cli.on_nan import CHOICES, on_nan_of
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError, JobError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.finite import MOST_IN_A_ROW, OnNan, may_be_spoilt
from mixmesh.runtime.not_finite import first_not_finite
from mixmesh.runtime.parallel import ParallelModel, parallelize
from mixmesh.runtime.train import RunReport, train
from mixmesh.search.baselines import data_parallel, tensor_parallel

WORLD, BATCH, WIDTH = 4, 12, 6
DEVICES = [DEVICE.format(6e-6), DEVICE.format(3e-6)]
CLUSTER = Cluster.parse(
    'name = "four"\n[network]\nbandwidth_gbit_per_s = 1\nlatency_us = 1\n'
    + f"[[machine]]\nlink_latency_us = 1\ndevices = [{', '.join(DEVICES)}]\n" * 2
)
SHARES, OWNERS = (4, 2, 4, 2), (1, 2, 0, 3)


class Model(nn.Module):
    """It has a mask of minus infinity that does no harm, an exponential that a large row overflows, and a
    root that has no gradient for a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(WIDTH, 8, bias=False, dtype=torch.float64)
        self.two = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        h = self.one(x)
        scores = h.masked_fill(h > 0, -math.inf)
        part = torch.cat([scores, h * 0], -1).softmax(-1)
        power = self.two(h).exp()
        length = h.square().sum(-1).sqrt()
        return (part.square().sum(-1) + power.mean(-1) + length).mean()


class Normed(nn.Module):
    """With statistics of batch norm, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm = nn.Linear(WIDTH, 8, dtype=torch.float64), nn.BatchNorm1d(8, dtype=torch.float64)

    def forward(self, x):
        return self.norm(self.one(x)).square().mean() + x.exp().mean()


class Penalty(nn.Module):
    """Its gradients are as large as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1e-3, dtype=torch.float64))

    def forward(self, x):
        return (x * self.weight).mean()


def rows(step: int, spoilt_row: int | None = None, value: float = 0.0) -> torch.Tensor:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    if spoilt_row is not None:
        x[spoilt_row] = value
    return x


def made_plan(kind: str, model: nn.Module) -> Plan:
    graph, costs = trace(model, {"x": rows(0)}).graph, CostModel(CLUSTER)
    if kind == "pipeline":
        return pipelined(cut_into(graph, ((2, 1, 0, 0), (0, 0, 2, 1)), costs), 2, CLUSTER)
    if kind == "two_level":
        return make_plan(cut_within_machines(graph, CLUSTER), CLUSTER)
    if kind == "tensor_parallel":
        return make_plan(tensor_parallel(graph, costs, make_ratio(SHARES)), CLUSTER)
    plain = data_parallel(graph, costs, make_ratio(SHARES))
    if kind == "micro_batches":
        halves = tuple(MicroBatch(n // 2, 2, n // 2) for n in SHARES)
        return make_plan(plain, CLUSTER, micro_batches=halves)
    stage = int(kind[-1]) if kind.startswith("zero") else 0
    return make_plan(with_stage(plain, stage, make_ratio(OWNERS)), CLUSTER)


def plan_of(kind: str, model: nn.Module) -> Plan:
    return Plan.load(Path(os.environ["PLANS"]) / f"{type(model).__name__}-{kind}.plan")


KINDS = ("zero_3", "tensor_parallel", "micro_batches", "pipeline", "two_level")
SPOILT_ROW = 7  # of a data-parallel plan on rank 2
FORWARD, BACKWARD = {"value": 1e4}, {"value": 0.0}


def line_of(code: str) -> str:
    """Where in this file the model has it."""
    lines, first = inspect.getsourcelines(Model.forward)
    return f"test_not_finite.py:{first + next(n for n, line in enumerate(lines) if code in line)}"


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


class Named:
    """The instruction is named under a plan of that kind, and the training goes on as if nothing had been."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, _) -> None:
        single = Model()
        plan = plan_of(self.kind, Model())
        mine = Model()
        options = {"device": "cpu", "timeout_s": 60, "check_model": False}
        model, optimizer = parallelize(mine, sgd(mine.parameters()), plan, **options)
        own = sgd(single.parameters())
        step(single, own, rows(0))
        loss = model(x=rows(0))
        loss.backward()
        assert first_not_finite(model, x=rows(0)) is None  # and the gradients stay
        optimizer.step()
        optimizer.zero_grad()
        self.expect_named(model, FORWARD, "aten.exp", ".exp()")
        self.expect_named(model, BACKWARD, "aten.sqrt", ".sqrt()")
        for number in range(1, 3):
            expected, got = step(single, own, rows(number)), step(model, optimizer, rows(number))
            assert abs(expected - got) < 1e-9, (self.kind, number)

    def expect_named(self, model: ParallelModel, batch: dict, op: str, code: str) -> None:
        x = rows(1, SPOILT_ROW, **batch)
        loss = model(x=x)
        loss.backward()
        is_forward = batch is FORWARD
        assert bool(loss.isfinite()) != is_forward
        found = first_not_finite(model, x=x)
        assert found.instruction.op == op and line_of(code) in found.where, (self.kind, found)
        assert ("backward" in found.got) != is_forward, found
        if self.kind in ("zero_3", "micro_batches"):
            assert found.rank == 2, found
        model.zero_grad()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    loss = model(x=x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def check_what_is_not_there_is_said(_) -> None:
    """A parameter that is not finite, and a model that is not parallel."""
    model, _ = parallelize(Model(), None, plan_of("zero_3", Model()), device="cpu", timeout_s=60)
    with torch.no_grad():
        model.two.bias.fill_(math.inf)
    model(x=rows(0))
    found = first_not_finite(model, x=rows(0))
    assert found.instruction.op == "param" and "8 infinite of 8 elements" not in found.got, found
    assert "infinite" in found.got and 'param("two.bias")' in found.where
    with pytest.raises(InputError, match="only a parallel model"):
        first_not_finite(Model(), x=rows(0))


# --- mixmesh run ----------------------------------------------------------------------------------------


def run(make, kind: str, data: list, on_nan: OnNan, folder: Path | None = None) -> RunReport:
    """One epoch of ``mixmesh run``."""
    plan = plan_of(kind, make())
    job = mixmesh.Job(make(), {"x": rows(0)}, data=[{"x": x} for x in data], optimizer=sgd)
    if folder is None:
        return train(job, plan, steps=None, epochs=1, device="cpu", timeout_s=60, on_nan=on_nan)
    keeper = RunCheckpoints(Settings(folder, Every(steps=1), 9), plan, 1, lambda text: None)
    try:
        return train(
            job, plan, steps=None, epochs=1, device="cpu", timeout_s=60, on_nan=on_nan, keeper=keeper
        )
    finally:
        assert keeper.close() == 0
        for thread in threading.enumerate():  # as the end of a process does
            if thread.name == "mixmesh checkpoint":
                thread.join()
        dist.barrier()


def expect_state(folder: Path, make, kind: str, data: list) -> None:
    """The newest checkpoint is that of a single device that was trained on ``data``, which is all finite."""
    single = make()
    own = sgd(single.parameters())
    for x in data:
        step(single, own, x)
    model, _ = parallelize(make(), None, plan_of(kind, make()), device="cpu", timeout_s=60)
    checkpoint.load(folder, model=model)
    for name, value in model.full_state_dict().items():
        if name != "norm.num_batches_tracked":
            torch.testing.assert_close(value, single.state_dict()[name], rtol=1e-9, atol=1e-9, msg=name)
    dist.barrier()


class Stops:
    """The parameters of the last good checkpoint are those before the step, and the error says where."""

    def __init__(self, make, kind: str, batch: dict, what: str) -> None:
        self.make, self.kind, self.batch, self.what = make, kind, batch, what

    def __call__(self, _) -> None:
        folder, good = shared_folder(), [rows(0), rows(1)]
        with pytest.raises(JobError, match=self.what) as error:
            run(self.make, self.kind, [*good, rows(2, SPOILT_ROW, **self.batch), rows(3)], OnNan.STOP, folder)
        assert "at step 3" in str(error.value) and "test_not_finite.py:" in error.value.where
        assert checkpoint.latest(folder).name.endswith("-step-2")
        expect_state(folder, self.make, self.kind, good)


class Skips:
    """Batches are left out on all ranks, as GradScaler leaves them out, and the rest is trained as ever."""

    def __init__(self, make, kind: str, batch: dict) -> None:
        self.make, self.kind, self.batch = make, kind, batch

    def __call__(self, _) -> None:
        folder, good = shared_folder(), [rows(n) for n in range(4)]
        bad = rows(9, SPOILT_ROW, **self.batch)
        report = run(self.make, self.kind, [*good[:2], bad, good[2], bad, good[3]], OnNan.SKIP, folder)
        assert report.num_skipped == 2 and len(report.losses) == 6
        assert checkpoint.latest(folder).name.endswith("-step-6")
        expect_state(folder, self.make, self.kind, good)


def check_so_many_in_a_row_end_the_run(_) -> None:
    good, bad = rows(0), rows(9, SPOILT_ROW, **FORWARD)
    data = [good, *[bad] * (MOST_IN_A_ROW - 1), good, *[bad] * MOST_IN_A_ROW]
    with pytest.raises(JobError, match=f"the last of {MOST_IN_A_ROW} steps in a row") as error:
        run(Model, "data_parallel", data, OnNan.SKIP)
    assert f"at step {len(data)}" in str(error.value) and "aten.exp" in error.value.where


def check_large_gradients_are_finite(_) -> None:
    """Their sum of squares is not."""
    huge = rows(0, SPOILT_ROW, 1e200)
    report = run(Penalty, "data_parallel", [rows(0), huge, rows(1)], OnNan.STOP)
    assert len(report.losses) == 3 and all(map(math.isfinite, report.losses))


def check_ignoring_trains_on(_) -> None:
    report = run(Model, "data_parallel", [rows(0), rows(9, SPOILT_ROW, **FORWARD), rows(1)], OnNan.IGNORE)
    assert report.num_skipped == 0
    assert [math.isfinite(loss) for loss in report.losses] == [True, False, False]


CHECKS = {
    **{f"named under {kind}": Named(kind) for kind in KINDS},
    "a parameter": check_what_is_not_there_is_said,
    "stops at a loss": Stops(Normed, "data_parallel", FORWARD, "the loss is (inf|nan)"),
    "stops at gradients of one rank": Stops(Model, "pipeline", BACKWARD, "gradients are not finite"),
    "skips a loss": Skips(Normed, "zero_2", FORWARD),
    "skips gradients of one rank": Skips(Model, "pipeline", BACKWARD),
    "too many in a row": check_so_many_in_a_row_end_the_run,
    "large gradients": check_large_gradients_are_finite,
    "ignores": check_ignoring_trains_on,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    os.environ["PLANS"] = str(folder := tmp_path_factory.mktemp("plans"))
    used = [(Model, kind) for kind in (*KINDS, "data_parallel")]
    for make, kind in (*used, (Normed, "data_parallel"), (Normed, "zero_2"), (Penalty, "data_parallel")):
        made_plan(kind, make()).save(folder / f"{make.__name__}-{kind}.plan")
    return run_world(WORLD, CHECKS, partial(initialise, WORLD, torch.device("cpu"), 60))


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(outcomes, name):
    assert_passed(outcomes[name])


def test_what_is_not_finite_among_gradients_is_always_seen():
    ones, half = torch.ones(3), torch.ones(2, dtype=torch.bfloat16)
    huge = torch.full((3,), 1e150, dtype=torch.float64)
    assert not may_be_spoilt([]) and not may_be_spoilt([ones, half, huge])
    for value in (math.nan, math.inf, -math.inf):
        assert may_be_spoilt([ones, torch.tensor([1.0, value])]) and may_be_spoilt([ones, half * value])


def test_the_option():
    chosen = {("stop", False), ("skip", False), ("ignore", False), ("ignore", True)}
    assert {on_nan_of(name, allow_nan) for name, allow_nan in chosen} == {*OnNan}
    assert on_nan_of(None, False) is OnNan.STOP and on_nan_of(None, True) is OnNan.IGNORE
    assert {*CHOICES} == {what.value for what in OnNan}
    for name, allow_nan in (("stop", True), ("skip", True), ("halt", False), ("", False)):
        with pytest.raises(InputError, match="what is done about a loss"):
            on_nan_of(name, allow_nan)
