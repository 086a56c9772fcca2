"""The bench of faults: what it must find, and a small training that is disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.commands.faults import summary
from benchmarks.faults import job
from benchmarks.faults.bench import Chaos, Trained, choose_kinds, draw_kinds, report
from benchmarks.faults.disturb import check_saved, check_start
from benchmarks.faults.journal import Line, Reader, last_executions
from benchmarks.faults.judgement import (
    Training,
    check_losses,
    check_samples,
    check_steps,
    loss_error,
    losses_of,
    samples_of,
    unreadable,
)
from benchmarks.faults.kinds import KINDS, Fault
from benchmarks.faults.scene import TOKEN_VARIABLE, Setting, end_marked
from benchmarks.faults.worker import BENCH_VARIABLE
from mixmesh import checkpoint
from mixmesh.errors import InputError, TestbedUnavailable
from mixmesh.measure.testbed.system import start_time

TRAINING = Training(samples=8, batch_size=4, epochs=2)
LOSSES = {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}


def whole_history() -> list[Line]:
    """Four steps of two ranks, of which the third was made twice: first by three."""
    lines = []
    for step, loss in LOSSES.items():
        ids = [(4 * step + n) % 8 for n in range(4)]
        for rank, own in enumerate((tuple(ids[:3]), tuple(ids[3:]))):
            lines.append(Line(10.0 * step + rank, rank, 7, rank, 2, step, loss, own))
    undone = [Line(25.0 + rank, rank, 6, rank, 3, 3, 2.5, (rank,)) for rank in range(2)]
    return [Line(0.0, 0, 7, 0, 2), *lines, *undone]


def problems(lines: list[Line]) -> list[str]:
    history = last_executions(lines)
    return [
        *check_steps(history, TRAINING),
        *check_samples(history, TRAINING),
        *check_losses(losses_of(history), LOSSES),
    ]


def changed(step: int, rank: int, **fields) -> list[Line]:
    """The history with other values in one line of an execution that counts."""
    return [
        replace(x, **fields) if (x.step, x.rank, x.world_size) == (step, rank, 2) else x
        for x in whole_history()
    ]


def test_a_whole_history_has_no_problem_and_executions_that_were_undone_do_not_count():
    assert problems(whole_history()) == []


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (changed(2, 1, ids=()), ["epoch 0: 1 samples lost: 3"]),
        (changed(4, 1, ids=(3, 4)), ["epoch 1: 1 samples seen more than once: 4"]),
        (changed(2, 1, ids=(4,)), ["samples lost: 3", "seen more than once: 4"]),
        (
            [x for x in whole_history() if x.step != 4],
            ["1 steps were not made: 4", "epoch 1: 4 samples lost"],
        ),
        ([x for x in whole_history() if (x.step, x.rank) != (4, 1)], ["of 2 ranks only these"]),
        (changed(4, 1, loss=1.1), ["step 4: ranks differ in its loss"]),
        (
            [replace(x, loss=1.00001) if x.step == 4 else x for x in whole_history()],
            ["1 losses differ from the undisturbed ones, at first step 4: 1.00001 in place of 1.0"],
        ),
        (
            [replace(x, loss=float("nan")) if x.step == 4 else x for x in whole_history()],
            ["step 4: nan in place of 1.0"],
        ),
        # the execution that was undone came last: as if a start had not gone on with it
        ([replace(x, time_s=99.0) if x.world_size == 3 else x for x in whole_history()], ["step 3: of 3"]),
    ],
)
def test_what_is_wrong_with_a_history_is_told(lines, texts):
    found = problems(lines)
    for text in texts:
        assert any(text in problem for problem in found), found


def test_ranks_that_load_whole_batches_must_load_the_same():
    def line(rank: int, *ids: int) -> Line:
        return Line(1.0, rank, 1, rank, 2, 1, 1.0, ids)

    assert samples_of([line(0, 1, 2, 3), line(1, 3, 2, 1)], 3) == [1, 2, 3]
    assert samples_of([line(0, 1, 2, 3), line(1, 3, 2, 4)], 3) == [1, 2, 2, 3, 3, 4]
    assert samples_of([line(0, 1, 2), line(1, 3)], 3) == [1, 2, 3]
    assert samples_of([line(0, 1, 2, 3), line(1, 2)], 3) == [2]  # one holds a part: what it loads counts


def test_a_changed_checkpoint_is_unreadable_unless_it_was_damaged_on_purpose(tmp_path):
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        checkpoint.save(tmp_path, model=model, optimizer=None, step=step)
    assert unreadable(tmp_path, set()) == []
    newest = checkpoint.latest(tmp_path)
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert [text.split(":")[0] for text in unreadable(tmp_path, set())] == [newest.name]
    assert unreadable(tmp_path, {newest.name}) == []


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    reader, path = Reader(tmp_path), tmp_path / "machine-0-1.jsonl"
    text = (
        b'{"time_s": 1, "machine": 0, "pid": 1, "rank": 0, "world_size": 2, "step": 3, "loss": 1, "ids": [4]}'
    )
    text += b"\n"
    path.write_bytes(text + text[:20])
    assert reader.read() == [Line(1, 0, 1, 0, 2, 3, 1, (4,))]
    path.write_bytes(text + text)
    assert len(reader.read()) == 1 and len(reader.lines) == 2


def result(*faults: Fault, **fields) -> Trained:
    values = {"losses": LOSSES, "problems": (), "loss_error": 0.0, "steps_made": 4, "time_s": 1.0}
    return Trained(**{**values, "faults": faults, "emulation": "none", **fields})


def test_targets_are_missed_by_each_thing_that_may_be_wrong():
    good = Fault("kill", 1, 5, noticed_s=2.0, again_s=9.0)

    def met(*trainings: Trained, count: int = 1) -> list[bool]:
        return list(report([result(), *trainings], count, "", 0)["targets"].values())

    assert met(result(good)) == [True] * 4
    assert met(result(good), count=2) == [False, True, True, True]  # one was not made
    assert met(result(replace(good, problem="stuck"))) == [False, True, True, True]
    assert met(result(replace(good, again_s=None))) == [False, True, True, True]
    assert met(result(good, problems=("epoch 0: 1 samples lost: 3",))) == [True, False, True, True]
    assert met(result(good, unreadable=("000001-step-5: cut",))) == [True, True, False, True]
    assert met(result(replace(good, noticed_s=31.0))) == [True, True, True, False]
    preempted = Fault("preempt", 0, 5, noticed_s=2.0, saved_s=1.5, again_s=9.0)
    assert met(result(preempted)) == [True] * 5
    assert met(result(replace(preempted, saved_s=31.0))) == [True, True, True, True, False]
    made = report([result(), result(preempted)], 1, "", 0)
    assert made["kinds"][0]["longest_saved_s"] == 1.5
    table_text = summary({**made, "time_s": 1.0}, Path("x.json"))
    assert "checkpoint finished, s" in table_text and "of SIGTERM, at most 1.5" in table_text
    row = report([result(), result(good, replace(good, noticed_s=7.0))], 2, "", 0)["kinds"][0]
    assert row["longest_noticed_s"] == 7.0 and row["longest_whole_s"] is None


def test_a_start_goes_on_from_the_newest_good_checkpoint():
    assert check_start("000003-step-20", 21) == "" == check_start("000003-step-20", 26)
    assert "went back to step 16" in check_start("000003-step-20", 16)
    assert check_start("000003-step-20", 1)


def test_ranks_that_are_told_to_stop_lose_no_step():
    lines = [Line(1.0, 0, pid, 0, 2, step, 1.0) for pid, step in ((6, 9), (7, 4), (7, 5))]
    assert check_saved("000003-step-5", lines, {7}) == ""
    assert "step 5 was made last" in check_saved("000002-step-4", lines, {7})


def test_kinds_are_drawn_alike_and_those_that_cannot_be_made_are_left_out():
    drawn = draw_kinds(KINDS, 25, random.Random(3))
    assert drawn == draw_kinds(KINDS, 25, random.Random(3)) != draw_kinds(KINDS, 25, random.Random(4))
    assert {sum(kind is other for other in drawn) for kind in KINDS} == {2, 3}
    told: list[str] = []
    kinds = choose_kinds((), True, told.append)
    assert [kind.name for kind in kinds] == ["kill", "stop", "preempt", "agent", "truncate", "flip"]
    assert "link, memory, share, disk" in told[0]
    with pytest.raises(TestbedUnavailable):
        choose_kinds(["disk"], True, told.append)
    with pytest.raises(InputError, match="no such kind"):
        choose_kinds(["meteor"], False, told.append)


def test_nothing_is_left_behind():
    """Not what a killed agent has started, found by its environment, nor a rank whose bench is gone."""
    bench = subprocess.Popen(["sleep", "60"], env={**os.environ, TOKEN_VARIABLE: "0123"})
    code = "from benchmarks.faults.worker import end_with_bench as f; import time; f(); time.sleep(60)"
    environment = {**os.environ, BENCH_VARIABLE: f"{bench.pid} {start_time(bench.pid)}"}
    rank = subprocess.Popen([sys.executable, "-c", code], env=environment)
    end_marked("4567")
    assert bench.poll() is None
    end_marked("0123")
    assert bench.wait(1) == -signal.SIGKILL
    assert rank.wait(30) == 1


def single_device_losses(steps: int) -> dict[int, float]:
    """The losses of the job, trained by plain PyTorch."""
    made = job.job()
    optimizer, losses = made.optimizer(made.model.parameters()), []
    while len(losses) < steps:
        for batch in made.data:
            optimizer.zero_grad()
            loss = made.model(**batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return dict(enumerate(losses[:steps], 1))


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("testbed")
def test_a_small_training_survives(tmp_path):
    """Two machines as plain processes: a rank that is stopped, one that is told to end, and one that is
    killed after a bit of the newest checkpoint was flipped."""
    training = Training(job.SAMPLES, job.BATCH_SIZE, epochs=3)
    setting = Setting(training, step_s=0.02, heartbeat_s=2.0, limit_s=90.0)
    kinds = choose_kinds(["stop", "flip", "preempt"], True, print)
    chaos = Chaos(kinds, 3, seed=1, setting=setting, num_machines=2, is_plain=True)
    expected = single_device_losses(training.steps)
    trained = list(chaos.disturb_all(expected, tmp_path))
    assert all(t.is_good for t in trained), trained
    assert sorted(f.kind for t in trained for f in t.faults) == ["flip", "preempt", "stop"]
    assert [f.saved_s is not None for t in trained for f in t.faults if f.kind == "preempt"] == [True]
    assert sum(t.steps_made for t in trained) > training.steps  # some were made again
    for t in trained:
        assert loss_error(t.losses, expected) < 1e-9
