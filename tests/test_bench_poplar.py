"""bench poplar: its plans, a round of them under memory limits, and what it makes of figures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import GRAPHS, graph

from benchmarks import jobs
from benchmarks.commands.poplar import shown
from benchmarks.poplar import CASES, cases, result_of, run_turns
from benchmarks.poplar_cases import MEASURED, NETWORK, SIMULATED, WARMUP_STEPS, machine
from benchmarks.poplar_plans import Parts, fast_half, plans, split, stage_in
from benchmarks.poplar_plans import planned as planned_of
from benchmarks.poplar_results import (
    AT_ONCE,
    EQUAL,
    HALF,
    OURS,
    PROPORTIONAL,
    MeasuredResult,
    Run,
    SimulatedResult,
    Variant,
    report,
)
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError, MixmeshError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import even_ratio, make_ratio
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure import testbed
from mixmesh.planner.task import Task

BATCH = 512  # of the graph at its size 64
CLUSTER = Cluster.parse(NETWORK + machine("fast", 2, "0.4", "1") + machine("slow", 2, "0.1", "0.5"))


def test_cases_by_name():
    assert cases(()) == CASES and set(MEASURED) | set(SIMULATED) < set(CASES)
    assert cases(("b", "llama-0.5b")) == (MEASURED[1], *SIMULATED[::2])
    assert cases(("poplar-c", "poplar-c")) == SIMULATED[4:]
    with pytest.raises(InputError, match="no such case"):
        cases(("d",))
    for case in MEASURED:
        assert sum(d.cpu_share for d in case.cluster.devices) <= 1.3


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5).map(make_ratio),
    st.integers(5, 300),
    st.integers(1, 50),
)
def test_parts_are_the_batch(ratio, batch, steps):
    rows = split(ratio, batch, steps)
    assert sum(sum(row.sizes) for row in rows) == batch
    assert len({row.steps for row in rows}) == 1
    assert all(0 <= row.last <= row.micro_batch for row in rows)


def test_equal_parts_are_equal():
    assert {tuple(row.sizes) for row in split(even_ratio(4), 160, 3)} == {(13, 13, 13, 1)}


@pytest.fixture(scope="module")
def planned():
    return plans(graph(GRAPHS["mlp"], 64), CLUSTER, None, (0, 1, 3), ADAM, at_once=True)


def test_plans_of_every_stage(planned):
    by_name = {name: [p for p in planned if p.variant.name == name] for name in (OURS, EQUAL, PROPORTIONAL)}
    for name, found in by_name.items():
        assert [p.variant.stage for p in found] == [0, 1, 3], name
        for p in found:
            assert stage_in(p.plan.program) == p.variant.stage and p.variant.fits
            assert p.plan.predicted_peak_memory_bytes == p.variant.predicted_bytes
            assert sum(sum(row.sizes) for row in p.variant.micro_batches) == BATCH
    for ours, equal in zip(by_name[OURS], by_name[EQUAL]):
        assert ours.variant.predicted_s <= equal.variant.predicted_s * (1 + 1e-9)
    assert {row.micro_batch for row in by_name[EQUAL][0].variant.micro_batches} == {BATCH // 4}
    counts = [row.micro_batch for row in by_name[PROPORTIONAL][0].variant.micro_batches]
    assert counts == [205, 205, 51, 51]
    (half,) = [p for p in planned if p.variant.name == HALF]
    assert half.plan.program.world_size == 2 == fast_half(CLUSTER).world_size


def outcome(step_s=(9.0,) * WARMUP_STEPS + (1.0,), peak=100, error="", out_of_memory=False) -> dict:
    value = None if error else {"step_s": list(step_s), "losses": [2.0, 1.0], "peak_bytes": peak}
    return {"value": value, "error": error, "out_of_memory": out_of_memory}


def test_out_of_memory_is_a_result():
    variant = Variant(EQUAL, 1, AT_ONCE)
    lost = outcome(error="CollectiveError: lost a peer")
    run = result_of(variant, [[lost, outcome(error="killed", out_of_memory=True)]], [2.0, 1.0])
    assert not run.ran and run.out_of_memory == (1,)
    with pytest.raises(MixmeshError, match="rank 0 failed"):
        result_of(variant, [[lost, outcome()]], [2.0, 1.0])


def test_rounds_are_summed_up():
    idle = {"value": None, "error": "", "out_of_memory": False}
    rounds = [
        [outcome((9.0,) * WARMUP_STEPS + (s, s), peak), idle]
        for s, peak in ((1.0, 90), (3.0, 110), (2.0, 100))
    ]
    run = result_of(Variant(HALF, 0, predicted_bytes=(121,)), rounds, [2.0, 1.01])
    assert run.rounds_s == (1.0, 3.0, 2.0) and run.median_s == 2.0 and run.peak_bytes == (110,)
    assert run.memory_errors == (pytest.approx(0.1),) and run.loss_error == pytest.approx(0.01 / 1.01)


def made(*, ours_s=1.0, equal_s=1.6, half_s=1.2, peak=100, overflow=True, error=0.0) -> MeasuredResult:
    def ran(name, step_s, setting="", predicted=110):
        return Run(Variant(name, 1, setting, (), 1.0, (predicted,)), (step_s,) * 3, (peak,), (), error)

    at_once = Run(Variant(EQUAL, 1, AT_ONCE, (), 1.0, (300,)), (), (), (0,), None)
    runs = (ran(OURS, ours_s), ran(EQUAL, equal_s), ran(HALF, half_s))
    return MeasuredResult(MEASURED[2], (*runs, at_once) if overflow else runs, (120,), "quota")


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"equal_s": 1.2}, ["1.3x equal"]),
        ({"half_s": 0.9}, ["fast half"]),
        ({"peak": 90}, ["within 15%"]),
        ({"peak": 121}, ["device's limit"]),
        ({"overflow": False}, ["run out of memory"]),
        ({"error": 1e-3}, ["losses"]),
    ],
)
def test_targets(changes, missed):
    result = made(**changes)
    found = [name for name, met in result.targets.items() if not met]
    assert len(found) == len(missed) and all(m in f for m, f in zip(missed, found))
    whole = json.loads(json.dumps(report([result], "python -m benchmarks poplar")))
    assert whole["targets_met"] == whole["targets"] - len(missed)
    assert ("rank 0" in shown(result)) == changes.get("overflow", True)


def test_simulated_counts_what_fits():
    variants = (
        Variant(OURS, 0, predicted_s=1.0, fits=False),
        Variant(OURS, 1, predicted_s=2.0),
        Variant(EQUAL, 0, predicted_s=1.5, fits=False),
        Variant(EQUAL, 1, predicted_s=3.0),
    )
    result = SimulatedResult(SIMULATED[0], variants, 1.0)
    assert result.speedup(EQUAL) == result.speedup(EQUAL, 1) == 1.5
    assert result.speedup(EQUAL, 0) is None is result.speedup(HALF)
    assert all(result.targets.values()) and "does not fit" in shown(result)


@pytest.mark.skipif(not testbed.probe().possible, reason="needs root and control groups")
def test_runs_go_on_after_one_that_ran_out_of_memory(tmp_path):
    """Two devices, one of them too small for its half of a batch at once."""
    case = "llama:96"
    small = Cluster.parse(NETWORK + machine("large", 1, "0.8", "1.5") + machine("small", 1, "0.8", "0.5"))
    rows = [("at once", case, 2, "ddp"), ("cut", case, 2, str(accumulating(case, small, tmp_path)))]
    (ddp, cut), emulation = run_turns(small, rows, tmp_path, lambda _: None)
    assert emulation == "quota"
    assert ddp[1]["out_of_memory"] and not ddp[0]["out_of_memory"] and ddp[0]["error"]
    assert [len(o["value"]["step_s"]) for o in cut] == [2, 2]
    assert all(o["value"]["peak_bytes"] > 2**27 for o in cut)


def accumulating(job: str, cluster: Cluster, folder):
    """The path of a plan of equal parts, cut as finely as memory asks for."""
    made = jobs.make(job)
    task = Task(trace(made.model, made.batch).graph, CostModel(cluster), ADAM, lambda _: None)
    even = even_ratio(2)
    cut = Parts(task, EQUAL, task.data_parallel(even), even).fewest_steps()
    assert cut is not None and cut.micro_batches is not None
    path = folder / "equal.plan"
    planned_of(task, EQUAL, cut).plan.save(path)
    return path
