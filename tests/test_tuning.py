"""tune: finalists of different kinds, trials in real processes, a profile corrected by what they took."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from gloo_world import assert_passed, run_world
from jobs import GOOD, write_job
from programs import TWO_DEVICES
from small_graphs import MLP, THREE, cluster, graph
from torch import nn

from mixmesh.__main__ import execute
from mixmesh.base.timeline import Timeline
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, DeviceProfile, Profile, device_key
from mixmesh.errors import CollectiveError, InputError
from mixmesh.frontend.job import Job
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.profiler import profile
from mixmesh.measure.tuning import (
    Trial,
    corrected,
    device_factors,
    kind_text,
    loop,
    one_round,
    same,
    trials,
    tune,
)
from mixmesh.measure.tuning.trials import hopeful
from mixmesh.planner import make_plan, make_plans
from mixmesh.runtime.comm import Comm, initialise
from mixmesh.runtime.gradients import GradientReducer

WORLD_SIZE = 2


# --- finalists ------------------------------------------------------------------------------------------


def test_finalists_begin_with_the_plan_itself_and_have_a_baseline():
    where, made = cluster(THREE, 1), graph(MLP, 48)
    plans = make_plans(made, where, count=5)
    alone = make_plan(made, where)
    assert same(plans[0], alone) and plans[0].predicted_step_s == alone.predicted_step_s
    assert 2 <= len(plans) <= 5
    assert any(p.planner in ("single", "ddp-even", "ddp-proportional", "fsdp-even") for p in plans)
    assert [p.predicted_step_s for p in plans[1:]] == sorted(p.predicted_step_s for p in plans[1:])
    for n, plan in enumerate(plans):
        assert plan.feasible and not any(same(plan, other) for other in plans[:n])


def test_one_plan_is_asked_for():
    assert len(make_plans(graph(MLP, 48), cluster(THREE, 1))) == 1


# --- a corrected profile ----------------------------------------------------------------------------------


def timeline(*compute_s: float) -> Timeline:
    return Timeline(max(compute_s), (), compute_s, 0.0)


def test_of_equal_devices_the_slower_counts_and_idle_ones_stay():
    where = cluster(THREE)  # fast, slow, slow
    fast, slow = (device_key(where.devices[n]) for n in (0, 1))
    one = (timeline(1.0, 1.0, 2.0), timeline(0.9, 1.1, 2.4))
    assert device_factors(where, [one]) == pytest.approx({fast: 0.9, slow: 1.2})
    idle = (timeline(1.0, 0.0, 0.0), timeline(1.0, 0.0, 0.01))
    assert device_factors(where, [idle]) == {fast: 1.0}
    three = (one, idle, (timeline(1.0, 1.0, 1.0), timeline(9.0, 1.0, 1.0)))
    assert device_factors(where, three) == pytest.approx({fast: 1.0, slow: 1.1})
    assert device_factors(where, three[2:])[fast] == 4.0


def test_a_corrected_profile_says_so_and_computes_as_long():
    where = cluster(THREE)
    fast, slow = (device_key(where.devices[n]) for n in (0, 1))
    before = Profile({fast: DeviceProfile({}, 1e-9, 5, 2.0), slow: DeviceProfile({}, 2e-9, 5)}, ())
    made = corrected(before, {fast: 1.5, slow: 1.0})
    assert made.devices[fast] == DeviceProfile({}, 1e-9 * 1.5, 5, 3.0, host_scale=1.5)
    assert made.devices[slow] == before.devices[slow]
    assert CostModel(where, before).source == "profile"
    assert CostModel(where, made).source == "profile, corrected by a trial"


def test_a_plan_keeps_what_was_measured():
    plan = make_plan(graph(MLP, 48), cluster(THREE))
    assert "measured_step_s" not in str(plan) and Plan.parse(str(plan)).measured_step_s is None
    assert Plan.parse(str(replace(plan, measured_step_s=0.25))).measured_step_s == 0.25


# --- trials in two processes -------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 2048), nn.Linear(2048, 256)

    def forward(self, x):
        return (self.down(self.up(x).relu()) - x).square().mean()


class Failing(torch.optim.SGD):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_step_pre_hook(self.fail)

    def fail(self, *_) -> None:
        if torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")


def job(optimizer=torch.optim.SGD) -> Job:
    torch.manual_seed(0)
    return Job(Net(), {"x": torch.randn(128, 256)}, partial(optimizer, lr=0.1))


def small() -> tuple[Cluster, tuple[Plan, ...]]:
    from mixmesh.frontend.trace import trace

    where = Cluster.parse(TWO_DEVICES)
    made = job()
    return where, make_plans(trace(made.model, made.batch), where, count=3)


def begin() -> None:
    initialise(WORLD_SIZE, torch.device("cpu"), 60.0)
    trials.TURN_S, trials.LEAST_TIMEOUT_S, trials.MOST_TIMEOUT_S = 0.01, 4.0, 4.0


def every_plan_has_its_turns(_) -> None:
    _, plans = small()
    found = one_round(job, one_round(job, list(map(Trial, plans)), record=True))
    assert [t.plan for t in found] == list(plans) and not any(t.failed for t in found)
    assert all(len(t.turns_s) == 2 and 0 < t.step_s < 10 for t in found)
    assert all(len(t.timeline.compute_s) == WORLD_SIZE and max(t.timeline.compute_s) > 0 for t in found)
    everyones: list = [None] * WORLD_SIZE
    torch.distributed.all_gather_object(everyones, [t.turns_s for t in found])
    assert everyones[0] == everyones[1]  # all decide alike


def a_rank_that_runs_out_of_memory_fails_the_trial_alone(_) -> None:
    _, plans = small()
    (failed,) = one_round(partial(job, Failing), [Trial(plans[0])])
    assert failed.failed == "rank 1: out of memory" and failed.step_s == float("inf")
    assert one_round(job, [failed]) == (failed,)
    (found,) = one_round(job, [Trial(plans[0])])
    assert found.turns_s and not found.failed


def nothing_trains(_) -> None:
    where, _ = small()
    with pytest.raises(CollectiveError, match="no plan could train"):
        tune(partial(job, Failing), where, None, count=1, rounds=1)


def planning_fails_on_every_rank(_) -> None:
    where, _ = small()
    with pytest.raises(InputError, match="unknown planner"):
        tune(job, where, None, planner="happ")


def turns_leave_nothing_behind(_) -> None:
    """Neither parameters nor process groups with their threads."""
    _, plans = small()

    def held() -> tuple[int, int]:
        one_round(job, [Trial(plans[0])])
        kept = sum(isinstance(o, (GradientReducer, Comm)) for o in gc.get_objects())
        return kept, len(os.listdir("/proc/self/task"))

    first = held()
    second, third = held(), held()
    assert first[0] == 0 and second == third == first, (first, second, third)


def what_a_device_took_changes_its_share(_) -> None:
    """As if the first of two devices had taken three times as long as it was predicted to."""
    from mixmesh.frontend.trace import trace

    where, made = Cluster.parse(TWO_DEVICES), job()
    measured = profile(trace(made.model, made.batch).graph, made, where, budget_s=1)
    real = loop.factors(where, measured, one_round(job, [Trial(small()[1][0])], record=True))
    assert set(real) == set(measured.devices) and all(1 / 4 <= f <= 4 for f in real.values())
    first = device_key(where.devices[0])
    loop.factors, before = (lambda *_: {first: 3.0}), loop.factors
    try:
        found = tune(job, where, measured, planner="ddp-proportional", count=1, rounds=1)
    finally:
        loop.factors = before
    shares = [t.plan.program.ratios[0][1][0] for t in found.trials]
    assert len(shares) >= 2 and shares[1] < shares[0] - 0.05, shares
    assert found.trials[1].plan.cost_source == "profile, corrected by a trial"
    assert any(same(found.plan, t.plan) for t in found.trials)


@pytest.fixture(scope="module")
def world():
    checks = {f.__name__: f for f in CHECKS}
    return run_world(WORLD_SIZE, checks, begin)


CHECKS = (
    every_plan_has_its_turns,
    a_rank_that_runs_out_of_memory_fails_the_trial_alone,
    nothing_trains,
    planning_fails_on_every_rank,
    turns_leave_nothing_behind,
    what_a_device_took_changes_its_share,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_trials(world, check):
    assert_passed(world[check.__name__])


# --- the command --------------------------------------------------------------------------------------


def test_what_the_table_calls_a_plan():
    plan = make_plan(graph(MLP, 48), cluster(THREE), planner="ddp-even")
    assert kind_text(plan).startswith("ddp-even, ") and "sum" in kind_text(plan)


def test_the_median_of_the_turns_counts():
    plan = make_plan(graph(MLP, 48), cluster(THREE), planner="ddp-even")
    assert Trial(plan, (1.0, 3.0, 2.0)).step_s == 2.0
    assert Trial(plan).step_s == Trial(plan, (1.0,), "out of memory").step_s == float("inf")


def test_who_is_far_behind_has_no_more_turns():
    plan = make_plan(graph(MLP, 48), cluster(THREE), planner="ddp-even")
    tried = [Trial(plan, (s,)) for s in (1.0, 1.1, 1.2)] + [Trial(plan, (0.5,), "out of memory")]
    assert hopeful(tried, 1) == [0, 1] and hopeful(tried, 2) == hopeful(tried, 3) == [0]
    assert loop.fastest([Trial(plan, (1.0, 1.1)), Trial(plan, (0.9,))]).turns_s == (1.0, 1.1)


def test_what_is_faster_by_chance_is_not_taken():
    plan = make_plan(graph(MLP, 48), cluster(THREE), planner="ddp-even")
    first, level, faster = (Trial(plan, (s, s)) for s in (1.0, 0.98, 0.96))
    assert loop.fastest([first, level]) is first and loop.fastest([first, level, faster]) is faster
    assert loop.fastest([Trial(plan, (1.0,)), level]) is level
    assert loop.fastest([Trial(plan, (1.0, 1.0), "out of memory"), level]) is level


def test_tune_in_the_testbed_and_a_run_by_its_plan(tmp_path, capfd, monkeypatch):
    write_job(tmp_path, GOOD)
    (tmp_path / "two.toml").write_text(TWO_DEVICES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIXMESH_TESTBED_FORCE_PLAIN", "1")
    line = "testbed --cluster two.toml -- mixmesh tune job.py --out t.plan --plans 3 --rounds 1 --json"
    assert execute(line.split()) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1].removeprefix("[rank 0] "))
    assert found["measured_step_s"] > 0 and sum(t["chosen"] for t in found["trials"]) == 1
    assert Plan.load("t.plan").measured_step_s == found["measured_step_s"]
    assert execute("testbed --cluster two.toml -- mixmesh run job.py --plan t.plan --steps 2".split()) == 0


def test_tune_says_what_to_type(tmp_path, capsys, monkeypatch):
    write_job(tmp_path, GOOD)
    (tmp_path / "two.toml").write_text(TWO_DEVICES)
    monkeypatch.chdir(tmp_path)
    assert execute("tune job.py --cluster two.toml --out t.plan".split()) == 2
    err = capsys.readouterr().err
    assert "needs one process on every device" in err
    assert "mixmesh testbed --cluster two.toml -- mixmesh tune job.py --cluster two.toml --out t.plan" in err
    assert not (tmp_path / "t.plan").exists()
