"""Trainings under torchrun that lose ranks, machines and memory, and go on with what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from elastic_job import BATCH, SAMPLES
from fuzz.ports import free_port
from warm_python import python

from mixmesh import checkpoint
from mixmesh.base.run_log import FAULT, RUN_LOG, STOP, read_log
from mixmesh.checkpoint.run import Every, Settings
from mixmesh.cli.checkpoint import checkpoint_stays
from mixmesh.cost import Profile
from mixmesh.errors import Infeasible
from mixmesh.lang.plan_file import Plan

JOB = Path(__file__).parent / "elastic_job.py"
ROOT = JOB.parents[1]
PER_EPOCH = SAMPLES // BATCH
LIMIT_S = 240.0  # for one event, on a busy machine
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"


class Agent:
    """torchrun on one machine, with a process for each of its devices."""

    def __init__(
        self,
        folder: Path,
        name: str,
        port: int,
        nodes: str,
        nproc: int,
        arguments: str,
        restarts: int,
        is_host: bool,
    ) -> None:
        self.output = folder / f"{name}.txt"
        paths = os.pathsep.join([str(ROOT), str(JOB.parent), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "", "MIXMESH_CACHE": str(folder / "cache"),
            "ELASTIC_FOLDER": str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
        }  # fmt: skip
        if nodes != "1":
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        conf = f"{QUICK},is_host={int(is_host)}"
        command = (
            f"-m torch.distributed.run --nnodes {nodes} --nproc-per-node {nproc} --max-restarts {restarts} "
            f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf {conf} -m mixmesh run {JOB} "
            f"--checkpoint {folder / 'checkpoints'} --profile-seconds 0 --planner ddp-even {arguments}"
        )
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()], env=environment, stdout=output, stderr=output
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str, start: int = 0) -> int:
        """The end of the first match after ``start``; fails where torchrun ends before it."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.compile(pattern).search(self.text(), start)) is None:
            assert time.monotonic() < deadline and self.process.poll() is None, (pattern, self.text()[-5000:])
            time.sleep(0.05)
        return found.end()

    def wait_for_steps(self, count: int, start: int) -> int:
        """The same of so many steps."""
        return self.wait_for(rf"(step \d+ .+\n){{{count}}}", start)

    def end(self) -> None:
        assert self.process.wait(LIMIT_S) == 0, self.text()[-5000:]


@pytest.fixture
def agents(tmp_path):
    """A function that starts torchrun; all processes end with the test."""
    started: list[Agent] = []
    port = free_port()

    def start(nodes: str, nproc: int, arguments: str, restarts: int = 9) -> Agent:
        is_host = all(agent.process.poll() is not None for agent in started)
        name = f"agent{len(started)}"
        started.append(Agent(tmp_path, name, port, nodes, nproc, arguments, restarts, is_host))
        return started[-1]

    yield start
    for agent in started:
        agent.process.kill()
    for process in processes(tmp_path):
        kill(process["pid"])


def processes(folder: Path) -> list[dict]:
    """The ranks of all starts so far, the newest last."""
    files = sorted(folder.glob("process-*"), key=lambda file: file.stat().st_mtime_ns)
    return [json.loads(file.read_text()) for file in files]


def newest(folder: Path, world: int, rank: int) -> dict:
    return [p for p in processes(folder) if (p["world"], p["rank"]) == (world, rank)][-1]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def whole_lines(file: Path) -> list[str]:
    """The lines of a file whose process may have been killed."""
    return [line for line in file.read_text().splitlines() if line.endswith("}")]


def committed(folder: Path) -> dict[int, list[int]]:
    """By step the samples of all ranks when it was made last."""
    rows: dict[int, list[dict]] = defaultdict(list)
    for file in folder.glob("samples-*"):
        for line in whole_lines(file):
            row = json.loads(line)
            rows[row["step"]].append(row)
    history = {}
    for step, made in rows.items():
        last = max(made, key=lambda row: row["at"])
        of_last = sorted(made, key=lambda row: row["at"])[-last["world"] :]
        assert sorted(row["rank"] for row in of_last) == list(range(last["world"])), (step, made)
        history[step] = [sample for row in of_last for sample in row["samples"]]
    return history


def assert_each_sample_once(folder: Path, epochs: int) -> None:
    """In the first ``epochs`` of a training, that may have gone further."""
    history = committed(folder)
    assert set(history) >= set(range(1, epochs * PER_EPOCH + 1))
    orders = []
    for epoch in range(epochs):
        steps = range(epoch * PER_EPOCH + 1, (epoch + 1) * PER_EPOCH + 1)
        orders.append([sample for step in steps for sample in history[step]])
        assert sorted(orders[-1]) == list(range(SAMPLES)), epoch
    assert orders[0] != orders[1]  # shuffled


def assert_goes_on_after(folder: Path, step: int, pid: int) -> None:
    """The start of process ``pid`` goes on after ``step``, and that was the last one that any had made."""
    rows = [json.loads(line) for line in whole_lines(folder / f"samples-{pid}")]
    assert rows[0]["step"] == step + 1, rows[0]
    files = folder.glob("samples-*")
    before = [
        row for file in files for row in map(json.loads, whole_lines(file)) if row["at"] < rows[0]["at"]
    ]
    last = max(before, key=lambda row: row["at"] if row["world"] == 1 else 0.0)
    assert last["step"] == step, last


def test_ranks_that_run_out_of_memory_are_stopped_or_killed(agents, tmp_path, monkeypatch):
    """With one torchrun: every start goes on, and every survivor says who was lost, and where."""
    (tmp_path / "limit-memory").touch()
    monkeypatch.setenv("ELASTIC_SAMPLE_S", "0.02")
    agent = agents("1", 2, "--every 3 --epochs 14 --heartbeat 2")
    read = agent.wait_for("has run out of memory")
    read = agent.wait_for(r"restart 1: 2 devices, no checkpoint yet: starting from scratch", read)
    read = agent.wait_for(r"step 20 ", read)
    stopped = newest(tmp_path, 2, 1)
    os.kill(stopped["pid"], signal.SIGSTOP)
    lost = r'rank 1 \(cpu.* of machine ".+"\) is stopped \(by a signal\).*, and the others wait for it in '
    read = agent.wait_for(lost + r".+, at step \d\d\n +where ", read)
    told_at = time.monotonic()
    read = agent.wait_for(r"restart 2: 2 of 2 devices, going on after step \d\d", read)
    restarted_s = time.monotonic() - told_at
    assert "Unable to shutdown process" not in agent.text(), restarted_s  # torchrun has not waited 30 s
    read = agent.wait_for(r"step [3-9]\d ", read)
    os.kill(newest(tmp_path, 2, 0)["pid"], signal.SIGKILL)
    read = agent.wait_for(
        r'rank 0 \(cpu.* of machine ".+"\) has ended without a message.*, at step \d+\n', read
    )
    agent.wait_for(r"restart 3: 2 of 2 devices, going on after step \d+", read)
    agent.end()
    assert len(committed(tmp_path)) == 14 * PER_EPOCH
    assert_each_sample_once(tmp_path, 14)
    # what the page of the training marks; the first rank is noted by the other one
    # (a survivor whose collective fails before it hears who was lost notes an error without a rank besides)
    noted = read_log(tmp_path / "checkpoints" / RUN_LOG).of(FAULT)
    faults = [fault for fault in noted if "rank" in fault.facts]
    assert [fault.facts["rank"] for fault in faults] == [1, 1, 0], noted
    assert all(re.match(r'cpu.* of machine ".+"', fault.facts["device"]) for fault in faults)
    for fault, why in zip(faults, ("has run out of memory", "is stopped", "has ended without a message")):
        assert why in fault.facts["why"] and fault.step > 0, fault


def test_machines_go_and_come_back(agents, tmp_path, monkeypatch):
    """With a torchrun for each machine: one is killed with its rank, and another one comes; then a torchrun
    alone is killed, and its rank ends with it."""
    monkeypatch.setenv("ELASTIC_SAMPLE_S", "0.01")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    arguments = "--every 5 --epochs 1000 --heartbeat 2"
    first, second = (agents("1:2", 1, arguments) for _ in range(2))
    read = first.wait_for_steps(10, first.wait_for("2 devices in 1 machine: "))
    second.process.kill()
    kill(newest(tmp_path, 2, 1)["pid"])
    read = first.wait_for(r"rank 1 \(.+\) has ended without a message", read)
    read = first.wait_for(r"1 of 2 devices, going on after step \d+", read)
    read = first.wait_for_steps(10, read)
    third = agents("1:2", 1, arguments)
    read = first.wait_for(r"stopped by SIGTERM", read)  # a new machine: nothing that was trained is lost
    # on a busy machine the new one may come to train alone for some steps, before the first has come back
    read = first.wait_for(r"2 of 2 devices, going on after step \d+\b", read)
    saved = int(re.search(r"\d+$", first.text()[:read])[0])
    read = first.wait_for_steps(10, read)
    assert_goes_on_after(tmp_path, saved, newest(tmp_path, 2, 1)["pid"])
    alone = newest(tmp_path, 2, 1)
    assert alone["agent"] == third.process.pid
    third.process.kill()
    read = first.wait_for(r"1 of 2 devices, going on after step \d+", read)
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{alone['pid']}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    last = saved + 6 * PER_EPOCH
    first.wait_for(rf"step {last} ", read)
    assert_each_sample_once(tmp_path, (last - 1) // PER_EPOCH)
    stops = read_log(tmp_path / "checkpoints" / RUN_LOG).of(STOP)
    assert (saved, "SIGTERM") in [(stop.step, stop.facts["cause"]) for stop in stops]


def provenances(folder: Path) -> list[dict]:
    """Those of the profiles that starts have planned with, the newest last."""
    files = sorted((folder / "cache" / "profiles").glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    return [Profile.load(file).provenance for file in files]


def test_a_restart_plans_with_what_was_measured_before(agents, tmp_path, monkeypatch):
    """Operators are measured by the first start, on two machines; the one that is left measures none, plans
    by them, and goes on."""
    monkeypatch.setenv("ELASTIC_SAMPLE_S", "0.01")
    monkeypatch.setenv("PYTHON_EXEC", python())  # of ranks
    (tmp_path / "steady-speed").touch()
    arguments = "--every 5 --epochs 1000 --heartbeat 2 --profile-seconds 1 --planner ddp-proportional"
    first, second = (agents("1:2", 1, arguments) for _ in range(2))
    read = first.wait_for_steps(10, first.wait_for("2 devices in 1 machine: "))
    (measured,) = provenances(tmp_path)
    assert "devices_kept" not in measured
    second.process.kill()
    kill(newest(tmp_path, 2, 1)["pid"])
    read = first.wait_for(r"1 of 2 devices, going on after step \d+", read)
    first.wait_for_steps(3, read)
    _, kept = provenances(tmp_path)
    assert len(kept["devices_kept"]) == 1 and kept["cluster"] != measured["cluster"]
    used = [Plan.load(file) for file in (tmp_path / "cache" / "plans").glob("*.plan")]
    assert {(plan.program.world_size, plan.cost_source) for plan in used} == {(2, "profile"), (1, "profile")}


def test_where_nothing_fits_all_end_and_the_checkpoint_stays(agents, tmp_path, monkeypatch):
    """The devices that a restart finds are too small: it says so, and the checkpoint is there for larger
    ones."""
    monkeypatch.setenv("ELASTIC_SAMPLE_S", "0.02")
    monkeypatch.setenv("PYTHON_EXEC", python())  # of ranks
    agent = agents("1", 2, "--every 5 --epochs 6 --heartbeat 2", restarts=1)
    read = agent.wait_for("step 12 ")
    (tmp_path / "little-memory").touch()
    os.kill(newest(tmp_path, 2, 1)["pid"], signal.SIGKILL)
    assert agent.process.wait(LIMIT_S) != 0
    said = agent.text()[read:]
    assert "Infeasible: " in said, said[-5000:]
    kept = checkpoint.latest(tmp_path / "checkpoints")
    assert f"{kept} stays" in said, said[-5000:]
    (tmp_path / "little-memory").unlink()
    agent = agents("1", 2, "--epochs 6")
    agent.wait_for(rf"2 of 2 devices, going on after step {int(kept.name.rpartition('-')[2])}, from {kept}")
    agent.end()
    assert_each_sample_once(tmp_path, 6)


def test_ctrl_c_without_checkpoints_ends_all_ranks(tmp_path):
    """Every rank of a terminal gets it: all end at once, with 128 and the signal's number."""
    port, ranks = free_port(), []
    paths = os.pathsep.join([str(ROOT), str(JOB.parent), os.environ.get("PYTHONPATH", "")])
    command = f"-m mixmesh run {JOB} --profile-seconds 0 --planner ddp-even --epochs 1000"
    for rank in range(2):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "",
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ELASTIC_FOLDER": str(tmp_path),
            "ELASTIC_SAMPLE_S": "0.01", "MIXMESH_CACHE": str(tmp_path / "cache"),
        }  # fmt: skip
        with open(tmp_path / f"rank{rank}.txt", "w") as output:
            ranks.append(
                subprocess.Popen(
                    [python(), *command.split()], env=environment, stdout=output, stderr=output,
                    # what runs in the background of a shell ignores it, and so would its children
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
            )  # fmt: skip
    try:
        said, deadline = tmp_path / "rank0.txt", time.monotonic() + LIMIT_S
        while "step 10 " not in said.read_text():
            assert time.monotonic() < deadline and ranks[0].poll() is None, said.read_text()
            time.sleep(0.05)
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        assert [rank.wait(30) for rank in ranks] == [128 + signal.SIGINT] * 2, said.read_text()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()


def test_where_nothing_fits_the_checkpoint_is_named(tmp_path):
    def hints(settings: Settings | None) -> str:
        with pytest.raises(Infeasible) as raised, checkpoint_stays(settings):
            raise Infeasible("no plan fits in memory", hint="a smaller batch")
        return " | ".join(raised.value.hint)

    settings = Settings(tmp_path, Every(steps=1), 3)
    assert hints(None) == "a smaller batch"
    assert "no checkpoint was written yet" in hints(settings)
    (tmp_path / "000002-step-140").mkdir()
    assert f"{tmp_path / '000002-step-140'} stays" in hints(settings)
