"""A device that becomes so slow that it is better left out: a plan of another form follows from a checkpoint,
in the same processes, and the training is as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz.ports import free_port
from rebalance import slow_job
from warm_python import python

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import Infeasible
from mixmesh.frontend.trace import trace
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import Plan
from mixmesh.search.baselines import data_parallel
from mixmesh.training.rebalance import Decision, Replanner, Solver, Terms

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0
CLUSTER = """
name = "two"
[[machine]]
link_gbit_per_s = 20
devices = [{ name = "a", tflop_per_s = 5e-5, memory_gib = 8, memory_gbyte_per_s = 100, count = 2 }]
"""
MORE_STEPS = 20


class Run:
    """``mixmesh run`` on two ranks, without a launcher."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "cluster.toml").write_text(CLUSTER)
        command = (
            f"-m mixmesh run {slow_job.__file__} --cluster {folder / 'cluster.toml'} "
            f"--profile-seconds 0 --json --steps 100000 "
            f"--checkpoint {folder / 'checkpoints'} --planner ddp-tuned"
        ).split()
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        common = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "",
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "MIXMESH_CACHE": str(folder / "cache"),
            "SLOW_FOLDER": str(folder),
        }  # fmt: skip
        self.folder, self.ranks = folder, []
        for rank in range(2):
            with open(folder / f"out{rank}", "w") as out, open(folder / f"said{rank}", "w") as said:
                self.ranks.append(
                    subprocess.Popen(
                        [python(), *command, *options],
                        env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=out, stderr=said,
                    )
                )  # fmt: skip

    def said(self) -> str:
        return "".join((self.folder / f"said{rank}").read_text() for rank in range(2))

    def num_steps(self, rank: int = 0) -> int:
        rows = samples_of(self.folder, rank)
        return max(rows, default=0)

    def wait_until(self, is_there) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_there():
            ended = any(rank.poll() is not None for rank in self.ranks)
            assert not ended and time.monotonic() < deadline, self.said()[-5000:]
            time.sleep(0.05)

    def stop(self) -> dict:
        """What the first rank tells when a signal has stopped the run."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)
        ends = [rank.wait(LIMIT_S) for rank in self.ranks]
        assert ends == [128 + signal.SIGTERM] * 2, (ends, self.said()[-5000:])
        return json.loads((self.folder / "out0").read_text())


def samples_of(folder: Path, rank: int) -> dict[int, list[int]]:
    file = folder / f"samples-{rank}"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    assert len({row["step"] for row in rows}) == len(rows)  # no step was made twice
    return {row["step"]: row["samples"] for row in rows}


def expected_losses(num_steps: int) -> list[float]:
    model, losses = slow_job.Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.stack([slow_job.Rows()[n] for n in range(slow_job.SAMPLES)])
    per_epoch = slow_job.SAMPLES // slow_job.BATCH
    for step in range(num_steps):
        start = step % per_epoch * slow_job.BATCH
        loss = model(rows[start : start + slow_job.BATCH])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def run(tmp_path):
    started = []

    def start(*options: str) -> Run:
        started.append(Run(tmp_path, *options))
        return started[-1]

    yield start
    for process in (p for one in started for p in one.ranks):
        process.kill()


def test_a_device_that_is_far_too_slow_is_left_out(run, tmp_path):
    training = run()
    training.wait_until(lambda: "applied, going on from a checkpoint" in training.said())
    before = training.num_steps()
    training.wait_until(lambda: training.num_steps() >= before + MORE_STEPS)
    told = training.stop()
    assert len(told["losses"]) == training.num_steps() and told["first_step"] == 1
    torch.testing.assert_close(
        torch.tensor(told["losses"]), torch.tensor(expected_losses(len(told["losses"]))), rtol=1e-6, atol=1e-9
    )
    first, last = samples_of(tmp_path, 0), samples_of(tmp_path, 1)
    assert last and max(last) < max(first)  # the slow one is left out
    per_epoch = slow_job.SAMPLES // slow_job.BATCH
    for step, samples in first.items():
        start = (step - 1) % per_epoch * slow_job.BATCH
        assert sorted(samples + last.get(step, [])) == list(range(start, start + slow_job.BATCH)), step
    decisions = told["rebalancing"]["decisions"]
    changes = [d["other_plan"] for d in decisions if d["is_applied"] and d["other_plan"]]
    assert changes == ["ddp-tuned on 2 of 2 devices -> ddp-tuned on 1 of 2 devices"], decisions


def plan_and_solver() -> tuple[Plan, Solver]:
    cluster = Cluster.parse(CLUSTER)
    batch = (torch.zeros(slow_job.BATCH, 65).double(),)
    program = data_parallel(trace(slow_job.Model(), batch).graph, CostModel(cluster), (0.5, 0.5))
    plan = Plan(program, "test", 0.01, (), cluster.fingerprint)
    return plan, Solver(cluster, None, ADAM)


def test_planning_again_is_tried_only_where_it_can_pay():
    plan, solver = plan_and_solver()
    planned_s = solver.planned_own_s(plan)
    asked: list[Cluster] = []
    raised: list[Infeasible] = []

    def plan_for(cluster, profile):
        asked.append(cluster)
        if raised:
            raise raised[0]
        return replace(plan, planner="other", predicted_step_s=1.05 * solver.balanced_step_s(plan, own_s)[1])

    def better(
        new_step_s: float, steps_left: int, planning_s: float = 1.0, is_other: bool = True, slow_share=0.1
    ):
        shares = (1 - slow_share, slow_share)
        terms = Terms(50, 20, (1.0, 40.0), (0.5, 0.5), shares, 1.0, new_step_s, steps_left, 0.5)
        in_place = Decision(terms, "")
        return Replanner(plan_for, planning_s).better(
            solver, plan, own_s, in_place, 2.0, 0.05, lambda plan: is_other
        )

    own_s = (planned_s[0], 40 * planned_s[1])
    restored = solver.balanced_step_s(plan, own_s)
    hoped_s = restored[1] / restored[0]  # of a step that takes 1 s now
    decision, other = better(0.5, 1000)
    assert decision.is_applied and other.plan.planner == "other"
    assert "plan test on 2 of 2 devices -> other on 2 of 2 devices" in decision.text() and len(asked) == 1
    assert other.cluster.devices[1].flop_per_s == pytest.approx(asked[0].devices[0].flop_per_s / 40)
    assert better(1.02 * hoped_s, 1000) is None  # other shares do as well
    assert better(0.5, 1000, planning_s=1e4) is None
    assert better(0.5, 3) is None
    assert len(asked) == 1
    assert better(0.5, 1000, is_other=False) is None
    assert len(asked) == 2
    better(1.02 * hoped_s, 1000, slow_share=0.01)  # without a sample: a plan without that device is looked at
    assert len(asked) == 3
    raised.append(Infeasible("nothing fits"))  # the training goes on under its plan
    assert better(0.5, 1000) is None and len(asked) == 4
    full = replace(plan, usable_bytes=(1000, 1000), predicted_peak_memory_bytes=(990, 10))
    decision = Decision(replace(decision.terms, new_step_s=0.5, pause_s=0.5, other_plan=""), "")
    at = (solver, full, own_s, decision, 2.0, 0.05, lambda plan: True)
    assert Replanner(plan_for, 1.0).better(*at) is None and len(asked) == 4
