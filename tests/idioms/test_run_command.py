"""``mixmesh run`` as a training command: epochs, weights that are kept, losses that are not finite, a plan
file that one machine has not."""

from __future__ import annotations

import os
import subprocess
from itertools import groupby
from pathlib import Path

import pytest
import torch
from fuzz.ports import free_port
from plans import THREE
from safetensors.torch import load_file
from torch import nn
from warm_python import python

import mixmesh
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, JobError
from mixmesh.frontend.job.optimizers import needs_whole_parameters
from mixmesh.runtime.job_data import Passes, endless
from mixmesh.runtime.saving import check_file, save_weights
from mixmesh.runtime.train import optimizer_of, scheduler_of

JOB = """
import os, torch, mixmesh
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.two.weight = self.one.weight
    def forward(self, x):
        return self.two(self.one(x)).square().mean()

generator = torch.Generator().manual_seed(1)
DATA = [{"x": torch.randn(8, 4, generator=generator).double()} for _ in range(3)]
if "SPOILT_ROW" in os.environ:
    DATA[1]["x"][int(os.environ["SPOILT_ROW"])] = float("nan")

def job():
    print("the job is loaded", flush=True)
    return mixmesh.Job(Model(), DATA[0], data=DATA, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
"""
TWO = THREE.replace(", count = 2", "")


def run(tmp_path: Path, arguments: str, **environment: str) -> list[subprocess.CompletedProcess]:
    """``mixmesh run`` by two ranks on two machines, as far as files go: each has a folder of its own."""
    (tmp_path / "job.py").write_text(JOB)
    own = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**os.environ, **own, "WORLD_SIZE": "2", "MIXMESH_CACHE": str(tmp_path / "cache"), **environment}
    command = [python(), "-m", "mixmesh", "run", str(tmp_path / "job.py"), *arguments.split()]
    ranks = []
    for rank in range(2):
        folder = tmp_path / f"machine{rank}"
        folder.mkdir(exist_ok=True)
        started = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        ranks.append(subprocess.Popen(command, cwd=folder, env=started, **pipes))
    try:
        outputs = [rank.communicate(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [subprocess.CompletedProcess(r.args, r.returncode, *out) for r, out in zip(ranks, outputs)]


def load_job(tmp_path: Path) -> dict:
    (tmp_path / "job.py").write_text(JOB)
    names: dict = {}
    exec(compile(JOB, str(tmp_path / "job.py"), "exec"), names)
    return names


def single_device(names: dict, epochs: int) -> dict[str, torch.Tensor]:
    model = names["Model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in names["DATA"] * epochs:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return model.state_dict()


def test_a_rank_without_the_plan_file_trains_and_the_weights_are_kept(tmp_path):
    names = load_job(tmp_path)
    plan = mixmesh.plan(names["Model"](), names["DATA"][0], Cluster.parse(TWO), planner="fsdp-even")
    (tmp_path / "machine0").mkdir()
    plan.save(tmp_path / "machine0" / "x.plan")
    done = run(tmp_path, "--plan x.plan --epochs 2 --save w.safetensors")
    for rank in done:
        assert rank.returncode == 0, rank.stderr
    assert "6 steps" in done[0].stdout and "weights written to w.safetensors" in done[0].stdout
    saved, expected = load_file(tmp_path / "machine0" / "w.safetensors"), single_device(names, 2)
    assert saved.keys() == expected.keys()  # the tied weight by both of its names
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-9, atol=1e-9)
    assert not list((tmp_path / "machine1").iterdir())


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    done = run(tmp_path, "--planner ddp-even --profile-seconds 0 --save w.pt", SPOILT_ROW="6")
    for rank in done:
        assert rank.returncode == 2 and "JobError: the loss is nan at step 2" in rank.stderr, rank.stderr
        # of 8 rows it has the last 4; the optimizer has made no step with it
        assert "rank 1: 4 nan of 16 elements of %x" in rank.stderr and 'input("x")' in rank.stderr
        assert rank.stdout.count("the job is loaded") == 1  # to plan and to train
    assert not (tmp_path / "machine0" / "w.pt").exists()


def test_an_epoch_is_all_of_the_data_once():
    assert list(endless([1, 2], None, 2)) == [1, 2, 1, 2]
    assert list(endless(iter([1, 2]), None, 2)) == [1, 2]
    assert list(endless(None, 3, 2)) == [3, 3]


def no_scheduler(optimizer):
    return None


def short_scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)


def test_errors_of_a_jobs_own_functions_are_told_as_its_own():
    job = mixmesh.Job(nn.Linear(2, 2), (), optimizer=lambda p: torch.optim.SGD(p, lr=-1))
    with pytest.raises(JobError, match="the job's optimizer raised ValueError: Invalid learning rate"):
        optimizer_of(job)
    with pytest.raises(JobError, match="the job's optimizer function returns None"):
        optimizer_of(mixmesh.Job(job.model, (), optimizer=lambda p: None))
    with pytest.raises(JobError, match="the job's optimizer function returns None"):  # when it is planned
        needs_whole_parameters(lambda p: None)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    with pytest.raises(JobError, match="the job's scheduler function returns no scheduler"):
        scheduler_of(mixmesh.Job(job.model, (), scheduler=no_scheduler), optimizer)
    _, step = scheduler_of(mixmesh.Job(job.model, (), scheduler=short_scheduler), optimizer)
    optimizer.step()
    step()
    with pytest.raises(JobError, match="the job's scheduler raised ValueError: Tried to step 2 times"):
        step()


class Once:
    """Data that gives its batches in its first pass only, as an open file does."""

    def __init__(self, batches: list) -> None:
        self._left = iter(batches)

    def __iter__(self):
        return self._left


@pytest.mark.parametrize("epochs", [None, 10**9])
def test_data_that_gives_no_more_batches_ends_the_training(epochs):
    assert list(endless([], None, epochs)) == []
    assert list(endless(Once([1, 2]), None, epochs)) == [1, 2]


def test_a_pass_may_be_the_rest_of_an_epoch_that_was_read():
    assert list(Passes([[], [1, 2], [], [3], [], [], [4]])) == [1, 2, 3]


def test_ranks_meet_at_the_end_of_passes_of_data():
    ends = []
    for _ in zip(range(19), endless([1, 2], None, None, lambda: ends.append(True))):
        ends.append(False)
    passes = [len([*same]) for is_end, same in groupby(ends) if not is_end]
    assert passes == [2, 2, 4, 8, 3]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_are_written_for_a_single_device(tmp_path, name):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    path = tmp_path / name
    check_file(path)
    save_weights(model.state_dict(), path)
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    model.load_state_dict(state)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_that_cannot_be_written_are_one_error(tmp_path, name):
    with pytest.raises(InputError, match="cannot write the weights"):
        save_weights(nn.Linear(3, 3).state_dict(), tmp_path / "gone" / name)


@pytest.mark.parametrize("name", ["w.safetensor", "nowhere/w.pt", "folder.pt"])
def test_files_that_cannot_be_written_are_refused_first(tmp_path, name):
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(InputError):
        check_file(tmp_path / name)
