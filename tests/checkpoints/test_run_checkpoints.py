"""``mixmesh run --checkpoint``: a run that goes on, that is stopped by a signal, and that is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz.ports import free_port
from gloo_world import assert_passed, run_world, shared_folder
from idioms.plans import THREE, named
from safetensors.torch import save_file
from test_plans import file_limit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from warm_python import python

import mixmesh
from mixmesh import checkpoint
from mixmesh.checkpoint import signals
from mixmesh.checkpoint.run import Every, RunCheckpoints, Settings
from mixmesh.checkpoint.signals import SAME_S
from mixmesh.cli.weights import initial_weights
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, JobError, PlanError
from mixmesh.frontend.job import load_job
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.train import train
from mixmesh.training.preparation.alike import digest

JOB = """
import os, resource, time, torch, mixmesh
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
        return (self.two(nn.functional.dropout(self.one(x), 0.3)) - y).square().mean()

def rows(count):
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=g).double(), torch.randn(count, 4, generator=g).double()

def job():
    if os.environ.get("FULL_DISK", "") == os.environ.get("RANK"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    torch.manual_seed(5)  # by which the data is shuffled
    loader = DataLoader(TensorDataset(*rows(40)), batch_size=8, shuffle=True)
    return mixmesh.Job(Model(), rows(8), data=loader, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
"""
TWO = THREE.replace(", count = 2", "")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """A folder with the job and a plan for it."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    names: dict = {}
    exec(compile(JOB, str(folder / "job.py"), "exec"), names)
    plan = mixmesh.plan(names["Model"](), names["rows"](8), Cluster.parse(TWO), planner="fsdp-even")
    plan.save(folder / "x.plan")
    return folder


class Run:
    """Two ranks that train; ``end`` waits for them."""

    def __init__(self, job: Path, folder: Path, arguments: str, program: str = "", **environment: str):
        common = {
            **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2",
            "MASTER_PORT": str(free_port()), "PYTHONUNBUFFERED": "1", **environment,
        }  # fmt: skip
        command = [
            program or python(), "-m", "mixmesh", "run", str(job / "job.py"), "--plan", str(job / "x.plan"),
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

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("0*"))


def wait_for(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 200
    while len(steps_in(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_that_ends_in_any_way_goes_on_to_the_last_digit(job, tmp_path):
    """By a signal that stops it, by two that end it at once and by SIGKILL: in the middle of an epoch, with
    dropout and data in random order."""
    stopped, ended = tmp_path / "stopped", tmp_path / "ended"
    stops = Run(job, stopped, f"--epochs 1000 --every 30 --save {tmp_path / 'w.pt'}", STEP_S="0.01")
    # whose ranks get SIGSTOP, which a forked one would not
    ends = Run(job, ended, "--epochs 1000 --every 1 --keep 2", program=sys.executable, STEP_S="0.02")
    wait_for(ended, 2)
    ends.ranks[0].send_signal(signal.SIGSTOP)  # so that rank 1 waits in a collective
    ends.ranks[1].send_signal(signal.SIGINT)
    time.sleep(SAME_S + 0.5)
    assert ends.ranks[1].poll() is None
    ends.ranks[1].send_signal(signal.SIGINT)
    assert ends.ranks[1].wait(20) == 128 + signal.SIGINT
    ends.kill()
    step = int(checkpoint.latest(ended).name.rpartition("-")[2])
    wait_for(stopped, 1)
    stops.ranks[1].send_signal(signal.SIGTERM)
    losses = stops.end(128 + signal.SIGTERM)["losses"]
    assert steps_in(stopped)[-1] == len(losses) < 5000 and not (tmp_path / "w.pt").exists()
    assert checkpoint.latest(stopped) is not None
    total = max(30, step + 3)
    rest = Run(job, ended, f"--steps {total} --every 100 --keep 2").end()
    compared = min(total, len(losses))
    assert 2 <= step < compared and rest["first_step"] == step + 1
    assert rest["losses"][: compared - step] == losses[step:compared]
    assert steps_in(ended)[-1] == total and len(steps_in(ended)) == 2


# --- in processes that live on -------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x, y):
        return (self.two(self.one(x).relu()) - y).square().mean()


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator).double(), torch.randn(
        count, 4, generator=generator
    ).double()


@cache
def planned(planner: str) -> mixmesh.Plan:
    return mixmesh.plan(Model(), rows(8), Cluster.parse(TWO), planner=planner)


def losses_of(
    folder: Path,
    planner: str = "fsdp-even",
    data: Any = "shuffled",
    initial: Any = lambda model: None,
    scheduler: Any = None,
    **settings,
) -> list[float]:
    """The losses of one start of ``mixmesh run``."""
    torch.manual_seed(5)
    if data == "shuffled":
        data = DataLoader(TensorDataset(*rows(40)), batch_size=8, shuffle=True)
    job, plan = mixmesh.Job(Model(), rows(8), data=data, scheduler=scheduler), planned(planner)
    limits = {name: settings.pop(name, None) for name in ("steps", "epochs")}
    keeper = RunCheckpoints(
        Settings(folder, **{"every": Every(steps=2), "keep": 2, **settings}),
        plan,
        limits["epochs"],
        lambda text: None,
        initial,
    )
    try:
        return list(train(job, plan, device="cpu", timeout_s=30, keeper=keeper, **limits).losses)
    finally:
        assert keeper.close() == 0
        dist.barrier()  # nobody looks at the folder while it is written to


class SlowData:
    """Batches that take so long each."""

    def __init__(self, batches: list, time_s: float) -> None:
        self.batches, self.time_s = batches, time_s

    def __iter__(self):
        for batch in self.batches:
            time.sleep(self.time_s)
            yield batch


def check_parts(_) -> None:
    for data in ("shuffled", [rows(8), rows(8)], None):
        whole = losses_of(shared_folder(), data=data, steps=9)
        folder = shared_folder()
        parts = [losses_of(folder, data=data, steps=steps) for steps in (3, 9)]
        assert parts[0] + parts[1] == whole and len(whole) == 9
        assert steps_in(folder) == [8, 9]


def quickly_lower(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)


def check_a_scheduler_goes_on(_) -> None:
    """To the last digit under the same plan, and alike under another one; without its state the rate would
    begin anew after the third step."""
    whole = losses_of(shared_folder(), steps=8, scheduler=quickly_lower)
    assert whole[:2] == losses_of(shared_folder(), steps=8)[:2] != whole[2:4]
    folder = shared_folder()
    first = losses_of(folder, steps=3, scheduler=quickly_lower)
    other = shared_folder()
    if dist.get_rank() == 0:
        shutil.copytree(folder, other, dirs_exist_ok=True)
    dist.barrier()
    assert first + losses_of(folder, steps=8, scheduler=quickly_lower) == whole
    got = first + losses_of(other, "ddp-proportional", steps=8, scheduler=quickly_lower)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(whole), rtol=1e-9, atol=1e-9)
    with pytest.raises(PlanError, match="no scheduler"):
        made_without = shared_folder()
        losses_of(made_without, steps=2)
        losses_of(made_without, steps=4, scheduler=quickly_lower)


def check_a_scheduler_of_another_class_is_refused(_) -> None:
    """PyTorch's schedulers would take over what they know of its state without a word."""
    folder = shared_folder()
    losses_of(folder, steps=2, scheduler=quickly_lower)
    with pytest.raises(PlanError, match=r"another scheduler(.|\n)*StepLR, as in(.|\n)*CosineAnnealingLR"):
        losses_of(folder, steps=4, scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9))
    assert steps_in(folder) == [2]


def check_a_scheduler_by_a_metric_is_refused(_) -> None:
    job = mixmesh.Job(Model(), rows(8), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(JobError, match="stepped by a metric"):
        train(job, planned("fsdp-even"), steps=2, device="cpu", timeout_s=30)


def check_another_plan(_) -> None:
    whole, folder = losses_of(shared_folder(), steps=8), shared_folder()
    got = losses_of(folder, steps=4) + losses_of(folder, "ddp-proportional", steps=8)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(whole), rtol=1e-9, atol=1e-9)


def check_steps_that_were_made_and_a_fresh_start(_) -> None:
    folder = shared_folder()
    losses = losses_of(folder, steps=4)
    assert losses_of(folder, steps=4) == [] and steps_in(folder) == [2, 4]
    assert losses_of(folder, steps=2, is_fresh=True) == losses[:2]
    assert checkpoint.latest(folder).name.endswith("-step-2")  # the one that was written last counts
    dist.barrier()
    assert losses_of(folder, steps=4) == losses[2:]


class DataBesideAnother:
    """Batches; before the last one another training writes a checkpoint to the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self):
        yield from [rows(8)] * 4
        if dist.get_rank() == 0:
            wait_for(self.folder, 2)
            (self.folder / "000099-step-7").mkdir()
        dist.barrier()
        yield from [rows(8)] * 2


def check_another_training_in_the_folder(_) -> None:
    folder = shared_folder()
    with pytest.raises(InputError, match="another training writes checkpoints to the same folder") as raised:
        losses_of(folder, data=DataBesideAnother(folder), steps=6)
    assert raised.value.got == "checkpoint 99"
    assert steps_in(folder) == [2, 4, 7]  # the other's does not make the own ones old


def check_epochs(_) -> None:
    for data, length in (("shuffled", 5), ([rows(8)] * 3, 3), (None, 1)):
        folder = shared_folder()
        assert len(losses_of(folder, data=data, steps=1)) == 1
        assert len(losses_of(folder, data=data, epochs=2)) == 2 * length - 1
        assert losses_of(folder, data=data, epochs=2) == []


def check_initial_weights(_) -> None:
    """They begin a run, also one that is fresh; a run that is gone on with has its own."""
    folder, other = shared_folder(), Model()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    if dist.get_rank() == 0:
        save_file(other.state_dict(), folder / "x.safetensors")
    dist.barrier()
    initial = initial_weights(folder / "x.safetensors", 30)
    expected = float(other(*rows(8)))
    without = losses_of(folder / "without", data=None, steps=1)
    once = train(mixmesh.Job(Model(), rows(8)), planned("fsdp-even"), steps=1, device="cpu", initial=initial)
    assert without[0] != expected and abs(once.losses[0] - expected) < 1e-12
    whole = losses_of(folder / "whole", data=None, steps=4, initial=initial)
    parts = [losses_of(folder / "parts", data=None, steps=steps, initial=initial) for steps in (2, 4)]
    assert parts[0] + parts[1] == whole and whole[0] == once.losses[0]
    assert losses_of(folder / "parts", data=None, steps=1, initial=initial, is_fresh=True) == whole[:1]


def check_a_clock(_) -> None:
    folder = shared_folder()
    slow = [rows(8)] * 3
    losses_of(folder, steps=9, every=Every(time_s=1), data=SlowData(slow, 0.3), keep=100)
    steps = steps_in(folder)
    assert steps[-1] == 9 and 1 < len(steps) < 6, steps


def check_a_signal_stops_a_loop_of_ones_own_on_all_ranks(_) -> None:
    model, _ = mixmesh.parallelize(Model(), None, planned("fsdp-even"), device="cpu", timeout_s=30)
    got: list[int] = []
    handler = lambda number, _: got.append(number)  # noqa: E731
    before = signal.signal(signal.SIGUSR1, handler)
    with checkpoint.Preemption(model) as preemption:
        for step in range(9):
            model(*rows(8))
            if step == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.2)  # for the thread that reads it
            if preemption.is_requested():
                break
    assert step == 5 and preemption.status == 128 + signal.SIGUSR1
    if dist.get_rank() == 1:  # a second one may belong to the first, and come when all is saved
        for same_s, expected in ((60.0, []), (0.0, [signal.SIGUSR1])):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(signals, "SAME_S", same_s)
                os.kill(os.getpid(), signal.SIGUSR1)
            assert got == expected
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.signal(signal.SIGUSR1, before)
    with checkpoint.Preemption(model) as preemption:
        assert not preemption.is_requested() and preemption.status == 0


def check_other_data_on_one_rank_is_never_kept(_) -> None:
    """From the fourth batch on, which are the ones that nothing else compares."""
    x, y = rows(8)
    data = [(x, y)] * 3 + [(x + dist.get_rank(), y)] * 3
    folder = shared_folder()
    with pytest.raises(InputError, match="the ranks did not make the same batch"):
        losses_of(folder, data=data, steps=6, every=Every(steps=3))
    assert steps_in(folder) == [3]


class SeesSaving:
    """Called after every step: whether a checkpoint is being written beside the training."""

    def __init__(self) -> None:
        self.keeper, self.is_beside = None, []

    def __call__(self, *_) -> None:
        self.is_beside.append(self.keeper._saving is not None)


def check_the_training_waits_for_a_checkpoint_where_one_rank_has_no_room(_) -> None:
    """A copy of the state needs some 2 KB, and the plan's own memory leaves so much on each rank."""
    for left_bytes, is_beside in (((2**20, 2**20), True), ((2**20, 9), False)):
        used = planned("fsdp-even").predicted_peak_memory_bytes
        usable = tuple(own + left for own, left in zip(used, left_bytes))
        plan = replace(planned("fsdp-even"), usable_bytes=usable)
        folder, seen = shared_folder(), SeesSaving()
        seen.keeper = RunCheckpoints(Settings(folder, Every(steps=1), 9), plan, None, lambda text: None)
        train(mixmesh.Job(Model(), rows(8)), plan, steps=3, device="cpu", keeper=seen.keeper, on_step=seen)
        assert seen.keeper.close() == 0
        dist.barrier()
        assert seen.is_beside == [False, is_beside, is_beside], left_bytes
        assert steps_in(folder) == [1, 2, 3]


def check_a_disk_that_is_full_ends_no_run(_) -> None:
    """Neither beside the training nor at its end; one rank cannot write."""
    whole, folder = losses_of(shared_folder(), steps=6), shared_folder()
    assert losses_of(folder, steps=2) == whole[:2]
    with file_limit(100 if dist.get_rank() == 1 else None):
        assert losses_of(folder, steps=5, every=Every(steps=1)) == whole[2:5]
    assert [path.name for path in folder.iterdir()] == ["000001-step-2"]
    dist.barrier()
    assert losses_of(folder, steps=6) == whole[2:]
    assert steps_in(folder) == [4, 6]


def check_an_iterator_is_refused(_) -> None:
    with pytest.raises(InputError, match="an iterator of batches cannot be resumed"):
        losses_of(shared_folder(), data=iter([rows(8)] * 9), steps=2)


CHECKS = named(
    check_parts,
    check_a_scheduler_goes_on,
    check_a_scheduler_of_another_class_is_refused,
    check_a_scheduler_by_a_metric_is_refused,
    check_another_plan,
    check_steps_that_were_made_and_a_fresh_start,
    check_epochs,
    check_another_training_in_the_folder,
    check_initial_weights,
    check_a_clock,
    check_a_signal_stops_a_loop_of_ones_own_on_all_ranks,
    check_other_data_on_one_rank_is_never_kept,
    check_the_training_waits_for_a_checkpoint_where_one_rank_has_no_room,
    check_a_disk_that_is_full_ends_no_run,
    check_an_iterator_is_refused,
)


def test_a_run_whose_last_checkpoint_was_not_written_does_not_end_well(job, tmp_path):
    """It says what is lost; with ``--save`` the trained weights are kept all the same."""
    folder = tmp_path / "kept"
    Run(job, folder, "--steps 2 --every 2").end()
    lost = Run(job, folder, "--steps 5 --every 2", FULL_DISK="1").end(1)
    assert "the checkpoint of step 5 could not be written" in lost["stderr"]
    assert steps_in(folder) == [2]
    weights = tmp_path / "w.pt"
    Run(job, folder, f"--steps 5 --save {weights}", FULL_DISK="1").end()
    assert weights.exists()
    Run(job, folder, "--steps 5").end()
    assert steps_in(folder) == [2, 5]


@pytest.fixture(scope="module")
def outcomes():
    return run_world(2, CHECKS, partial(initialise, 2, torch.device("cpu"), 60))


@pytest.mark.parametrize("name", CHECKS)
def test_a_start(outcomes, name):
    assert_passed(outcomes[name])


@pytest.mark.parametrize("path", ("examples/gpt.py", "benchmarks/demo/job.py"))
def test_the_data_of_jobs_that_are_shown_can_be_gone_on_with(path):
    """Each start makes the same batches; an iterator ``mixmesh run --checkpoint`` would refuse."""
    data = load_job(str(Path(__file__).parents[2] / path)).data
    starts = [list(islice(data, 2)) for _ in range(2)]
    assert [digest(batch) for batch in starts[0]] == [digest(batch) for batch in starts[1]]
    assert iter(data) is not data


def test_how_often():
    assert Every.parse("50") == Every(steps=50) and Every.parse("90s") == Every(time_s=90)
    for text in ("", "0", "0s", "-1", "1m", "s"):
        with pytest.raises(InputError, match="how often") as caught:
            Every.parse(text)
        assert caught.value.hint == ("--every 60s" if text == "1m" else "--every 600s",)
