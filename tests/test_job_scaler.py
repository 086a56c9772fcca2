"""Parts of a job in training. Its scaler: the loss is scaled, and all ranks leave out steps whose gradients
overflow. Its batch: each rank holds its share."""

from __future__ import annotations

import math
import os
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world, shared_folder
from test_dtypes import job as job_of_half
from test_dtypes import program as program_of_half
from test_not_finite import BATCH, WIDTH, WORLD, made_plan
from test_not_finite import Model as Rooted
from torch import nn

import mixmesh
from mixmesh import checkpoint
from mixmesh.checkpoint.run import Every, RunCheckpoints, Settings
from mixmesh.errors import JobError, PlanError
from mixmesh.frontend.job.checks import check_job
from mixmesh.lang.ir import parse_program
from mixmesh.lang.plan_file import Plan
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.finite import OnNan
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.train import RunReport, train

KINDS = ("data_parallel", "zero_3", "tensor_parallel", "micro_batches", "pipeline", "two_level")
HUGE = 1e306  # finite, and so is what the model makes of it; its gradients are not when they are scaled
SPOILT_ROW = 7  # of a data-parallel plan on rank 2


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x):
        return self.two(self.one(x)).mean()


def rows(step: int, *, is_spoilt: bool = False) -> torch.Tensor:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    if is_spoilt:
        x[SPOILT_ROW] = HUGE
    return x


DATA = [rows(n, is_spoilt=n in (2, 5)) for n in range(8)]


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def lower(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def scaler(**options) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", growth_interval=2, backoff_factor=0.25, **options)


def on_one_device() -> tuple[list[float], dict, dict]:
    """Losses, weights and the scaler's state of a loop with PyTorch's own scaler."""
    model, own = Linear(), scaler()
    optimizer = sgd(model.parameters())
    scheduler, losses = lower(optimizer), []
    for x in DATA:
        before, loss = own.get_scale(), model(x)
        own.scale(loss).backward()
        own.step(optimizer)
        own.update()
        if own.get_scale() >= before:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict(), own.state_dict()


def plan_of(kind: str) -> Plan:
    return Plan.load(Path(os.environ["PLANS"]) / f"{kind}.plan")


def run(kind: str, folder: Path, steps: int, *, own: torch.amp.GradScaler | None = None) -> RunReport:
    """A start of ``mixmesh run``."""
    data = [{"x": x} for x in DATA]
    job = mixmesh.Job(Linear(), data[0], optimizer=sgd, data=data, scheduler=lower, scaler=own or scaler())
    keeper = RunCheckpoints(Settings(folder, Every(steps=3), 9), plan_of(kind), 1, lambda text: None)
    try:
        return train(
            job, plan_of(kind), steps=steps, device="cpu", timeout_s=60, on_nan=OnNan.STOP, keeper=keeper
        )
    finally:
        assert keeper.close() == 0
        dist.barrier()


class Trained:
    """A run, stopped in its middle just after an overflow, ends as the loop of one device does."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, _) -> None:
        losses, weights, state = on_one_device()
        assert all(map(math.isfinite, losses)) and state["scale"] == 65536 * 2 / 4 * 2 / 4 * 2
        folder = shared_folder()
        parts = [run(self.kind, folder, 3), run(self.kind, folder, len(DATA))]
        assert [part.num_skipped for part in parts] == [1, 1]
        got = torch.tensor([loss for part in parts for loss in part.losses])
        torch.testing.assert_close(got, torch.tensor(losses), rtol=1e-9, atol=1e-9)
        model, _ = parallelize(Linear(), None, plan_of(self.kind), device="cpu", timeout_s=60)
        kept = mixmesh.GradScaler("cpu")
        checkpoint.load(folder, model=model, scaler=kept)
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-9)
        assert kept.state_dict() == state


def check_a_scale_below_one_mends_nothing(_) -> None:
    """A gradient that is not finite for what it is, and not for its scale, ends the run."""
    data = [{"x": x} for x in (rows(0), rows(1), torch.zeros(BATCH, WIDTH).double())]
    job = mixmesh.Job(Rooted(), data[0], optimizer=sgd, data=data, scaler=scaler(init_scale=0.25))
    with pytest.raises(JobError, match="gradients are not finite at step 3"):
        train(job, plan_of("Rooted"), steps=3, device="cpu", timeout_s=60, on_nan=OnNan.STOP)


def check_a_checkpoint_without_a_scaler_is_refused(_) -> None:
    folder = shared_folder()
    run("zero_3", folder, 1, own=scaler(enabled=False))
    with pytest.raises(PlanError, match="no scaler"):
        run("zero_3", folder, 2)


def check_the_whole_batch_is_let_go(_) -> None:
    """Before the first step: a rank on a CPU holds its share of a job's batch, as the plan counts."""
    batch = rows(0)
    whole, seen = weakref.ref(batch), []
    jobs = [mixmesh.Job(Linear(), {"x": batch}, optimizer=sgd)]
    del batch
    plan = plan_of("data_parallel")
    train(jobs.pop(), plan, steps=1, device="cpu", timeout_s=60, on_start=lambda: seen.append(whole()))
    assert seen == [None]


CHECKS = {
    **{kind: Trained(kind) for kind in KINDS},
    "below one": check_a_scale_below_one_mends_nothing,
    "kept without": check_a_checkpoint_without_a_scaler_is_refused,
    "let go": check_the_whole_batch_is_let_go,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    os.environ["PLANS"] = str(folder := tmp_path_factory.mktemp("plans"))
    for kind in KINDS:
        made_plan(kind, Linear()).save(folder / f"{kind}.plan")
    made_plan("zero_3", Rooted()).save(folder / "Rooted.plan")
    return run_world(WORLD, CHECKS, partial(initialise, WORLD, torch.device("cpu"), 60))


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(outcomes, name):
    assert_passed(outcomes[name])


def check_ranks_without_bf16(_) -> None:
    """float16 stands in there: refused without a scaler, and near one device with it."""
    (model, batch), text = job_of_half(), str(with_stage(program_of_half(), 2, (0.5, 0.5, 0.0)))

    def trained(own):
        job = mixmesh.Job(job_of_half()[0], batch, optimizer=sgd, scaler=own)
        return train(job, parse_program(text), steps=3, device="cpu", timeout_s=60)

    for own in (None, scaler(enabled=False)):
        with pytest.raises(JobError, match="ranks 0, 2 have no bf16 and compute it in float16") as caught:
            trained(own)
        assert "GradScaler" in str(caught.value)
    optimizer, losses = sgd(model.parameters()), []
    for _step in range(3):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    torch.testing.assert_close(trained(scaler()).losses, tuple(losses), rtol=0.02, atol=0.02)


@pytest.fixture(scope="module")
def outcomes_of_half():
    return run_world(3, {"half": check_ranks_without_bf16})


def test_ranks_without_bf16_need_one(outcomes_of_half):
    assert_passed(outcomes_of_half["half"])


def test_a_scaler_of_another_kind_is_refused():
    with pytest.raises(JobError, match="scaler of another kind") as caught:
        check_job(mixmesh.Job(Linear(), {"x": rows(0)}, scaler=1024.0))
    assert "GradScaler()" in str(caught.value)
