"""Timelines: the trace file, predicted names, two of them compared, the measured step of real processes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace

import pytest
import test_gloo
import torch
from gloo_world import assert_passed, run_world
from jobs import GOOD, write_job
from programs import TWO_DEVICES
from warm_python import python

from mixmesh.__main__ import execute
from mixmesh.base.timeline import (
    LOSS_SUM,
    Event,
    Timeline,
    bucket_name,
    compare,
    durations,
    save_trace,
    to_chrome_trace,
)
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.collectives import reduce_scatter
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.recording import Recorder, recorded
from mixmesh.simulator import simulate

PLANS = ("ddp-even", "fsdp-even")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline")
    write_job(path, GOOD)
    (path / "two.toml").write_text(TWO_DEVICES)
    for planner in PLANS:
        arguments = [str(path / "job.py"), "--cluster", str(path / "two.toml"), "--planner", planner]
        assert execute(["plan", *arguments, "--out", str(path / f"{planner}.plan")]) == 0
    return path


def check(trace: dict) -> list[dict]:
    """The events of a trace file that is well formed."""
    rows = trace["traceEvents"]
    for e in rows:
        assert e["ph"] in ("M", "X") and e["name"]
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int)
        assert e["ts"] >= 0 and e["dur"] >= 0
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in rows if e["name"] == "thread_name"}
    events = [e for e in rows if e["ph"] == "X"]
    assert {named[e["pid"], e["tid"]] for e in events} == {"compute", "communication"}
    for thread in named:
        own = sorted((e for e in events if (e["pid"], e["tid"]) == thread), key=lambda e: e["ts"])
        for a, b in zip(own, own[1:]):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-3, "events of one thread overlap"
    return events


# --- the value and its file -------------------------------------------------------------------------------

STEP = Timeline(
    4.0,
    (1, 1),
    (1.0, 2.0),
    2.0,
    (
        Event(0, "compute", "h", 0.0, 1.0, "aten.linear"),
        Event(1, "compute", "h", 0.0, 2.0, "aten.linear"),
        Event(0, "communication", "h.r", 1.0, 3.0, "all_gather", 64),  # waits for rank 1
        Event(1, "communication", "h.r", 2.0, 3.0, "all_gather", 64),
        Event(0, "communication", "g", 1.5, 4.0),  # issued while h.r was on its way
        Event(1, "communication", "g", 2.0, 4.0),
    ),
)


def test_a_trace(tmp_path):
    trace = to_chrome_trace(STEP, name="predicted", devices=["cpu-70", "cpu-30"])
    events = check(trace)
    assert len(events) == 6
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0 (cpu-70)", "rank 1 (cpu-30)"]
    gather = next(e for e in events if e["name"] == "h.r")
    assert (gather["ts"], gather["dur"]) == (1e6, 2e6)
    assert gather["args"] == {"op": "all_gather", "size_bytes": 64}
    save_trace(trace, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == trace
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_trace_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot write the timeline"):
        save_trace(to_chrome_trace(STEP, name="x"), tmp_path / "missing" / "t.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError):
        save_trace(to_chrome_trace(STEP, name="x"), tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_collective_counts_once_and_without_waiting():
    assert durations(STEP) == {("h", 0): 1.0, ("h", 1): 2.0, ("h.r", None): 1.0, ("g", None): 1.0}


def test_several_process_groups():
    """A sum of gradients and a gather of fewer ranks, both beside another gather: three rows, and each
    takes its own time."""
    more = (
        Event(0, "communication", "gradients of w", 1.5, 4.0, "all_reduce", 64),
        Event(1, "communication", "gradients of w", 2.5, 4.0, "all_reduce", 64),
        Event(0, "communication", "k.r", 2.0, 3.5, "all_gather", 8),
    )
    step = replace(STEP, events=(*STEP.events[:4], *more))
    found = durations(step)
    assert (found["h.r", None], found["gradients of w", None], found["k.r", None]) == (1.0, 1.5, 1.5)
    trace = to_chrome_trace(step, name="predicted")
    check(trace)
    rows = [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert rows == [(0, "compute"), *[(0, "communication")] * 3, (1, "compute"), *[(1, "communication")] * 2]


def test_comparing():
    other = replace(
        STEP, step_s=5.0, compute_s=(1.0, 3.0),
        events=(*(replace(e, end_s=3.0) if (e.rank, e.name) == (1, "h") else e for e in STEP.events[:4]),
                Event(1, "compute", "batch", 4.0, 4.5)),
    )  # fmt: skip
    found = compare(STEP, other, largest=3)
    assert (found.step.predicted_s, found.step.measured_s) == (4.0, 5.0)
    assert [(d.what, d.rank, d.predicted_s, d.measured_s) for d in found.streams] == [
        ("compute", 0, 1.0, 1.0), ("compute", 1, 2.0, 3.0), ("communication", None, 2.0, 1.0),
    ]  # fmt: skip
    assert [(d.what, d.rank, d.predicted_s, d.measured_s) for d in found.largest] == [
        ("h", 1, 2.0, 3.0), ("g", None, 1.0, None), ("batch", 1, None, 0.5),
    ]  # fmt: skip
    same = compare(STEP, STEP)
    assert all(d.size_s == 0 for d in (same.step, *same.streams, *same.largest))


def test_bucket_names_do_not_depend_on_the_order():
    assert bucket_name(["b", "a", "c"]) == bucket_name(["c", "b", "a"]) == "gradients of a +2"
    assert bucket_name(["a"]) == "gradients of a"


# --- predicted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", PLANS)
def test_predicted_names_are_the_programs(planner, folder):
    plan, costs = Plan.load(folder / f"{planner}.plan"), CostModel(Cluster.load(folder / "two.toml"))
    named = simulate(plan.program, costs, events=True)
    results = {r for i in plan.program.instructions for r in i.results}
    for e in named.events:
        stem = e.name.removesuffix(" grad").removesuffix(" again")
        assert stem in results or e.name in ("optimizer", LOSS_SUM) or e.name.startswith("gradients of ")
    names = {e.name for e in named.events}
    if planner == "ddp-even":
        assert bucket_name(["up.weight", "up.bias", "down.weight", "down.bias"]) in names
    else:
        assert {"up.weight", "up.weight grad", "down.weight again", "linear grad"} <= names
        assert "up.weight again" not in names and "down.bias again" not in names  # no derivative reads them


def test_simulate_writes_a_trace(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert execute("simulate fsdp-even.plan --cluster two.toml --trace s.json --json".split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    trace = json.loads((folder / "s.json").read_text())
    events = check(trace)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found["predicted_step_s"] * 1e6)
    assert trace["otherData"]["name"] == "predicted"


# --- measured ---------------------------------------------------------------------------------------------


def started(folder, launcher: str, rest: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python(), "-m", *launcher.split(), *rest.split()],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


TORCHRUN = "torch.distributed.run --nproc-per-node 2 -m mixmesh"


@pytest.mark.parametrize("planner", PLANS)
def test_run_writes_a_trace(planner, folder):
    rest = f"run job.py --plan {planner}.plan --steps 7 --json"
    traced = started(folder, TORCHRUN, f"{rest} --trace {planner}.json --cluster two.toml")
    assert traced.returncode == 0, traced.stderr
    found = json.loads(traced.stdout.splitlines()[-1])
    assert {"step_s_median", "predicted_step_s", "losses", "peak_memory_bytes"} <= set(found)
    plain = json.loads(started(folder, TORCHRUN, rest).stdout.splitlines()[-1])
    assert found["losses"] == plain["losses"]  # to the last bit: measuring changes nothing
    assert "comparison" not in plain

    trace = json.loads((folder / f"{planner}.json").read_text())
    events = check(trace)
    assert trace["otherData"]["name"] == "measured"
    program = Plan.load(folder / f"{planner}.plan").program
    predicted = simulate(program, CostModel(Cluster.load(folder / "two.toml")), events=True)
    for rank in (0, 1):
        names = [e["name"] for e in events if e["pid"] == rank]
        wanted = {e.name for e in predicted.events if e.rank == rank}
        assert wanted <= set(names), wanted - set(names)
        assert set(names) - wanted == {"batch"}
        assert names.count("optimizer") == 1 and names.count("linear") == 1
        described = {
            (e.name, e.op, e.size_bytes)
            for e in predicted.events
            if e.rank == rank and e.name != LOSS_SUM  # of which the recording has no size
        }
        told = {(e["name"], e["args"].get("op", ""), e["args"].get("size_bytes"))
                for e in events if e["pid"] == rank}  # fmt: skip
        assert described <= told, described - told
        own = sorted((e for e in events if e["pid"] == rank), key=lambda e: e["ts"])
        assert own[0]["name"] == "optimizer"
        first = {e["name"]: e["ts"] for e in reversed(own)}
        order = [
            first[n] for n in ("linear", "relu", "linear_1", "linear_1 grad", "relu grad", "linear grad")
        ]
        assert order == sorted(order)
    # on aligned clocks no rank has a collective's result before all have come
    for name in {e["name"] for e in events if e["cat"] == "communication"}:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name]
        assert max(s for s, _ in spans) <= min(e for _, e in spans) + 20e3, name

    compared = found["comparison"]
    assert compared["step"]["predicted_s"] == pytest.approx(predicted.step_s)
    assert compared["step"]["measured_s"] > 0
    assert [d["what"] for d in compared["streams"]] == ["compute", "compute", "communication"]
    assert compared["largest"]


def test_run_prints_the_comparison_in_the_testbed(folder, monkeypatch):
    monkeypatch.setenv("MIXMESH_TESTBED_FORCE_PLAIN", "1")
    rest = "run job.py --plan ddp-even.plan --steps 4 --trace bed.json"
    done = started(folder, "mixmesh", f"testbed --cluster two.toml -- mixmesh {rest}")
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("\n  one step ")[2].splitlines()
    assert table[0].split() == ["rank", "predicted", "measured", "measured/predicted"]
    assert [row.split()[0] for row in table[1:5]] == ["step", "compute", "compute", "communication"]
    assert len(table) == 15
    check(json.loads((folder / "bed.json").read_text()))


def check_recording(name: str) -> None:
    """Recorded passes give the same numbers, and each event of the prediction once per pass."""
    single, _, model, _ = test_gloo.build(name)
    recorder = Recorder(model.comm)
    plain = model(**test_gloo.batch(0))
    with model.recorded(recorder):
        loss = model(**test_gloo.batch(0))
        loss.backward()
    assert torch.equal(loss, plain)
    single(**test_gloo.batch(0)).backward()
    test_gloo.same_gradients(single, model)
    recorded = recorder.events(0.0)
    model(**test_gloo.batch(0)).backward()
    assert len(recorder.events(0.0)) == len(recorded), "nothing is recorded outside"
    assert all(e.end_s >= e.start_s for e in recorded)
    computed = sorted((e for e in recorded if e.stream == "compute"), key=lambda e: e.start_s)
    assert all(a.end_s <= b.start_s for a, b in zip(computed, computed[1:]))
    cluster = Cluster.parse("[[machine]]\ndevices = [{ cpu_share = 0.5, count = 3 }]")
    predicted = simulate(model.program, CostModel(cluster), events=True)
    rank = model.comm.rank
    wanted = {e.name for e in predicted.events if e.rank == rank and e.name != "optimizer"}
    names = {e.name for e in recorded}
    # the product of gathered factors is computed where gradients are taken in, between the instructions
    missing = {n for n in wanted - names if not n.endswith(" factors product")}
    missing = {n for n in missing if not n.startswith("parameters of ")}  # no optimizer has stepped
    if name == "tensor_parallel" and rank:  # as_partial: only rank 0's loss counts, so only it has a gradient
        missing -= {"mean grad", "s grad", "d grad", "o grad"}
    assert not missing, (name, rank, missing)


def test_recording_every_kind_of_program():
    checks = {name: Recording(name) for name in test_gloo.PROGRAMS}
    for failures in run_world(test_gloo.WORLD, checks).values():
        assert_passed(failures)


@dataclass(frozen=True)
class Recording:
    program: str

    def __call__(self, _) -> None:
        check_recording(self.program)


def test_too_few_steps(folder):
    done = started(folder, TORCHRUN, "run job.py --plan ddp-even.plan --steps 2 --trace few.json")
    assert done.returncode == 1 and "too few steps for a timeline" in done.stderr
    assert not (folder / "few.json").exists()


def check_a_collective_without_future(_) -> None:
    comm = Comm.of_sets(2, (), device="cpu")
    recorder = Recorder(comm)
    channel = recorded(
        comm.channel(comm.everyone, "reduce_scatter of a test"), recorder, "s", "reduce_scatter", 24
    )
    mine = reduce_scatter(channel, torch.arange(6.0), (4, 2), algorithm="padded")
    assert torch.equal(mine, 2 * torch.arange(6.0)[(slice(0, 4), slice(4, 6))[comm.rank]])
    (event,) = recorder.events(0.0)
    assert event.name == "s" and event.end_s > event.start_s and event.size_bytes == 24


def test_reduce_scatter_of_gloo_is_recorded_when_it_is_awaited():
    """It has no future."""
    (failures,) = run_world(2, {"reduce_scatter": check_a_collective_without_future}).values()
    assert_passed(failures)
