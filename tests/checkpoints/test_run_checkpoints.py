"""``mixmesh run --checkpoint``: a run that goes on, that is stopped by a signal, and that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gloo_world import free_port
from idioms.plans import THREE

import mixmesh
from mixmesh import checkpoint
from mixmesh.checkpoint.run import Every
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError

JOB = """
import os, time, torch, mixmesh
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()
    def forward(self, x, y):
        if self.training:
            time.sleep(float(os.environ.get("STEP_S", "0")))
        return (self.two(nn.functional.dropout(self.one(x), float(os.environ.get("DROPOUT", "0.3")))) - y).square().mean()

def rows(count):
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=g).double(), torch.randn(count, 4, generator=g).double()

def job():
    torch.manual_seed(5)  # by which the data is shuffled
    loader = DataLoader(TensorDataset(*rows(40)), batch_size=8, shuffle=True)
    return mixmesh.Job(Model(), rows(8), data=loader, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
"""  # noqa: E501
TWO = THREE.replace(", count = 2", "")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A folder with the job and two plans for it."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    names: dict = {}
    exec(compile(JOB, str(folder / "job.py"), "exec"), names)
    for planner in ("ddp-proportional", "fsdp-even"):
        plan = mixmesh.plan(names["Model"](), names["rows"](8), Cluster.parse(TWO), planner=planner)
        plan.save(folder / f"{planner}.plan")
    return folder


class Run:
    """Two ranks that train; ``end`` waits for them."""

    def __init__(
        self, job: Path, folder: Path, arguments: str, planner: str = "fsdp-even", **environment: str
    ):
        common = {
            **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2",
            "MASTER_PORT": str(free_port()), "PYTHONUNBUFFERED": "1", **environment,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "mixmesh", "run", str(job / "job.py"), "--plan", str(job / f"{plan}.plan"),
            "--checkpoint", str(folder), "--json", *arguments.split(),
        ]  # fmt: skip
        self.ranks = [
            subprocess.Popen(
                command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]  # fmt: skip

    def end(self, status: int = 0) -> dict:
        """What the first rank said, when all have ended with ``status``."""
        try:
            outputs = [rank.communicate(timeout=280) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
        assert [rank.returncode for rank in self.ranks] == [status] * 2, outputs
        return json.loads(outputs[0][0].splitlines()[-1]) | {"stderr": outputs[0][1]}


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("0*"))


def wait_for(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 200
    while len(steps_in(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_in_parts_is_one_run(job, tmp_path):
    """In the middle of an epoch too, with dropout and data in random order; and under another plan."""
    whole = Run(job, tmp_path / "whole", "--steps 9 --every 100")
    part = Run(job, tmp_path / "parts", "--steps 3 --every 2 --keep 2").end()
    assert steps_in(tmp_path / "parts") == [2, 3]
    rest = Run(job, tmp_path / "parts", "--steps 9 --every 2 --keep 2").end()
    expected = whole.end()["losses"]
    assert part["losses"] + rest["losses"] == expected and len(expected) == 9
    assert rest["first_step"] == 4 and steps_in(tmp_path / "parts") == [8, 9]
    ended = Run(job, tmp_path / "parts", "--steps 9").end()
    assert ended["losses"] == [] and steps_in(tmp_path / "parts") == [8, 9]
    fresh = Run(job, tmp_path / "parts", "--steps 2 --fresh").end()
    assert fresh["losses"] == expected[:2] and steps_in(tmp_path / "parts") == [2, 8, 9]
    assert checkpoint.latest(tmp_path / "parts").name.endswith("-step-2")  # the one that was written last


def test_another_plan_goes_on(job, tmp_path):
    whole = Run(job, tmp_path / "whole", "--steps 8", DROPOUT="0")
    part = Run(job, tmp_path / "parts", "--steps 4", DROPOUT="0").end()
    rest = Run(job, tmp_path / "parts", "--steps 8", plan="ddp-proportional", DROPOUT="0").end()
    got, expected = part["losses"] + rest["losses"], whole.end()["losses"]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(job, tmp_path, number):
    run = Run(job, tmp_path, "--epochs 1000 --every 3", STEP_S="0.02")
    wait_for(tmp_path, 1)
    run.ranks[1].send_signal(number)
    report = run.end(128 + number)
    assert steps_in(tmp_path)[-1] == len(report["losses"]) < 5000
    rest = Run(job, tmp_path, f"--steps {len(report['losses']) + 2}").end()
    assert len(rest["losses"]) == 2


def test_a_second_signal_ends_at_once(job, tmp_path):
    run = Run(job, tmp_path, "--epochs 1000 --every 1", STEP_S="0.02")
    wait_for(tmp_path, 1)
    run.ranks[0].send_signal(signal.SIGSTOP)  # so that rank 1 waits in a collective
    run.ranks[1].send_signal(signal.SIGUSR1)
    time.sleep(2.5)
    assert run.ranks[1].poll() is None
    run.ranks[1].send_signal(signal.SIGUSR1)
    assert run.ranks[1].wait(5) == 128 + signal.SIGUSR1
    run.ranks[0].kill()
    run.ranks[0].communicate()
    assert checkpoint.latest(tmp_path) is not None


def test_a_run_that_is_killed_goes_on(job, tmp_path):
    run = Run(job, tmp_path / "killed", "--steps 2000 --every 1 --keep 2", STEP_S="0.005")
    wait_for(tmp_path / "killed", 2)
    for rank in run.ranks:
        rank.kill()
        rank.communicate()
    step = int(checkpoint.latest(tmp_path / "killed").name.rpartition("-")[2])
    rest = Run(job, tmp_path / "killed", f"--steps {step + 3}").end()
    whole = Run(job, tmp_path / "whole", f"--steps {step + 3}").end()
    assert rest["losses"] == whole["losses"][step:]


def test_how_often():
    assert Every.parse("50") == Every(steps=50) and Every.parse("90s") == Every(time_s=90)
    for text in ("", "0", "0s", "-1", "1m", "s"):
        with pytest.raises(InputError, match="how often"):
            Every.parse(text)
