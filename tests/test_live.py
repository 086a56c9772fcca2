"""The progress of a training: lines, a file of JSON lines, TensorBoard."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_python import python

from mixmesh.base.files import TAIL_BYTES
from mixmesh.base.run_log import parse_log, read_log
from mixmesh.cli.live import Live, check_targets, lag_text, left_text
from mixmesh.errors import InputError
from mixmesh.lang.ir import Program
from mixmesh.lang.plan_file import Plan

ROOT = Path(__file__).parents[1]
PLAN = Plan(Program("p", 1, (), (), ""), "hap", 0.1, (), "", bound_s=0.1)
JOB = """import torch, mixmesh
def job():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.Flatten(0))
    model.forward = lambda x: torch.nn.Sequential.forward(model, x).square().mean()
    return mixmesh.Job(model, (torch.randn(16, 8),))
"""


def test_a_line_says_how_fast_and_how_long(capsys):
    live = Live(PLAN, 32, 100, is_quiet=False, print_every=10)
    for number in range(10):
        live.after_step(number, 2.5, 0.2)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "step 10  loss 2.5  200 ms  160 samples/s  50% of the bound  18 s left"


def test_lags_of_ranks(capsys):
    live = Live(PLAN, None, 3, is_quiet=False)
    live.own_seconds(2, [0.2, 0.212, 0.203])
    live.after_step(1, 2.5, 0.2)
    assert (
        capsys.readouterr().out == "step 2  loss 2.5  200 ms  50% of the bound  lag 0 / 12 / 3 ms  0 s left\n"
    )
    assert lag_text([0.1] * 8 + [0.15]) == "rank 8 lags 50 ms"


def test_a_full_disk_ends_the_log_and_not_the_training(capsys):
    live = Live(PLAN, 32, None, (Path("/dev/full"), None), is_quiet=True)
    live.after_step(0, 2.5, 0.2)
    live.after_step(1, 2.5, 0.2)
    live.close()
    assert capsys.readouterr().err.count("/dev/full is not written any more: No space left on device") == 1


def test_output_that_cannot_be_written_does_not_end_the_training(tmp_path):
    """Neither the training nor the status that a launcher reads: Python ends with 120 where standard output
    still holds lines."""
    script = tmp_path / "tells.py"
    script.write_text(
        "from mixmesh.cli.live import Live\n"
        "from mixmesh.lang.ir import Program\n"
        "from mixmesh.lang.plan_file import Plan\n"
        "live = Live(Plan(Program('p', 1, (), (), ''), 'hap', 0.1, (), ''), 32, None, is_quiet=False)\n"
        "live.after_step(0, 2.5, 0.2)\n"
        "live.after_step(1, 2.5, 0.2)\n"
        "live.close()\n"
    )
    for target in ("/dev/full", "&-"):
        command = f"exec {sys.executable} {script} >{target}"
        ran = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=120)
        assert (ran.returncode, ran.stderr) == (0, "")


class Terminal(io.StringIO):
    """A terminal that may be closed while a program prints to it."""

    is_there = True

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self.is_there:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


def test_a_bar_outlives_its_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    live = Live(PLAN, 32, 9, is_quiet=False)
    live.after_step(0, 2.5, 0.2)
    assert "0/9" in terminal.getvalue()
    terminal.is_there = False
    live.after_step(1, 2.5, 0.2)
    live.close()


def test_a_log_of_two_starts(tmp_path):
    """The second start goes on after step 2: steps 3 and 4 of the first are undone."""
    file = tmp_path / "log.jsonl"
    for first, count, loss in ((0, 4, 2.5), (2, 3, 1.5)):
        live = Live(PLAN, 32, None, (file, None), is_quiet=True)
        live.started(first)
        for number in range(first, first + count):
            live.after_step(number, loss, 0.2)
            if number == 1:
                live.saved(2)
        live.own_seconds(first + count, [0.1, 0.2])
        live.shares_changed(first + count, 0.4, "slow")
        live.close()
    file.write_text(file.read_text() + '{"step": 6, "lo')  # its process was killed
    log = read_log(file)
    assert [(s.step, s.loss) for s in log.steps] == [(1, 2.5), (2, 2.5), (3, 1.5), (4, 1.5), (5, 1.5)]
    assert [(m.step, m.num_undone, m.facts["bound_s"]) for m in log.of("start")] == [(0, 0, 0.1), (2, 2, 0.1)]
    assert [m.step for m in log.of("checkpoint")] == [2]
    assert [(m.step, m.facts) for m in log.of("shares")] == [
        (n, {"pause_s": 0.4, "cause": "slow"}) for n in (4, 5)
    ]
    assert [(m.step, m.facts) for m in log.of("own")] == [(5, {"own_s": [0.1, 0.2]})]  # the other is undone


@pytest.mark.parametrize("cut_off", ('{"step": 2, "lo', "x" * (2 * TAIL_BYTES + 5)))
def test_a_start_goes_on_after_a_line_that_was_cut_off(tmp_path, cut_off):
    """As a machine that crashes leaves one; the log stays one that can be read."""
    file = tmp_path / "log.jsonl"
    for first in (0, 1):
        live = Live(PLAN, 32, None, (file, None), is_quiet=True)
        live.started(first)
        live.after_step(first, 2.5, 0.2)
        live.close()
        assert [s.step for s in read_log(file).steps] == list(range(1, first + 2))
        with file.open("a") as log:
            log.write(cut_off)
    Live(PLAN, 32, None, (file, None), is_quiet=True).close()
    assert file.read_text().endswith("}\n") and len(read_log(file).steps) == 2


def test_a_disk_that_gets_full_within_a_line_leaves_none_cut_off(tmp_path, capsys):
    """A limit on the size of files stands for it: both take the part of a line for which there is room."""
    file = tmp_path / "log.jsonl"
    live = Live(PLAN, 32, None, (file, None), is_quiet=True)
    live.after_step(0, 2.5, 0.2)
    size, before = file.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        live.after_step(1, 2.5, 0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    live.close()
    assert file.stat().st_size == size
    assert "log.jsonl is not written any more: File too large" in capsys.readouterr().err


def test_another_file_is_no_log():
    with pytest.raises(InputError, match="not a log of a training") as caught:
        parse_log(
            '{"step": 1, "loss": 2, "step_s": 0.1, "samples_per_s": 3, "time_s": 1}\n{"a": 1}\n', "x.jsonl"
        )
    assert "x.jsonl:2" in str(caught.value)


def test_the_last_step_is_always_told(capsys):
    live = Live(PLAN, None, 3, is_quiet=False, print_every=10)
    for number in range(3):
        live.after_step(number, 2.5, 0.2)
    assert capsys.readouterr().out == "step 3  loss 2.5  200 ms  50% of the bound\n"


@pytest.mark.parametrize("time_s, text", ((12.3, "12 s"), (150, "2 min"), (7200, "2 h"), (100_000, "27.8 h")))
def test_times_left(time_s, text):
    assert left_text(time_s) == text


def test_a_file_goes_on_and_has_no_number_that_json_lacks(tmp_path):
    file = tmp_path / "log.jsonl"
    for first in (0, 2):
        live = Live(PLAN, 32, None, (file, None), is_quiet=True)
        live.after_step(first, 2.5, 0.2)
        live.after_step(first + 1, math.nan, 0.2)
        live.close()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == [2.5, None, 2.5, None]
    assert rows[0]["samples_per_s"] == 160


def test_what_cannot_be_written_is_refused_before_the_training(tmp_path):
    with pytest.raises(InputError, match="cannot write the log: No such file") as caught:
        check_targets(tmp_path / "none" / "log.jsonl", None, 10)
    assert "log.jsonl" in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write the folder for TensorBoard") as caught:
        check_targets(None, tmp_path / "file", 10)
    assert str(tmp_path / "file") in str(caught.value)


def mixmesh_run(words: list[str], stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "mixmesh", "run", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=stdout, stderr=subprocess.PIPE, text=True,
        timeout=200,
    )  # fmt: skip


def test_a_run_goes_on_where_nobody_reads_what_it_says(tmp_path):
    """The reader of its output is gone, as after ``| head``: the restart after a fault still trains."""
    job, kept = tmp_path / "train.py", tmp_path / "kept"
    job.write_text(JOB)
    words = [str(job), "--profile-seconds=0", "--cache", str(tmp_path / "cache"), "--checkpoint", str(kept)]
    done = mixmesh_run([*words, "--steps=2"])
    assert done.returncode == 0 and len(read_log(kept / "run.jsonl").steps) == 2, done.stderr
    with open("/dev/full", "w") as nobody:
        done = mixmesh_run([*words, "--steps=4"], nobody)
    assert done.returncode == 0, done.stderr
    assert [(m.step, m.num_undone) for m in read_log(kept / "run.jsonl").of("start")] == [(0, 0), (2, 0)]


def test_a_log_among_checkpoints_that_cannot_be_written_is_refused(tmp_path):
    job, kept = tmp_path / "train.py", tmp_path / "kept"
    job.write_text(JOB)
    (kept / "run.jsonl").mkdir(parents=True)
    done = mixmesh_run([str(job), "--checkpoint", str(kept)])
    assert done.returncode == 2 and "InputError: cannot write the log: Is a directory" in done.stderr
    assert "tracing" not in done.stderr  # nor is anything measured


def test_a_run_tells_all_three(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job, log, board = tmp_path / "train.py", tmp_path / "log.jsonl", tmp_path / "board"
    job.write_text(JOB)
    words = [str(job), "--profile-seconds=0", "--steps=4", "--print-every=2"]
    words += ["--log-json", str(log), "--tensorboard", str(board), "--cache", str(tmp_path / "cache")]
    done = mixmesh_run(words)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d+)  loss ", done.stdout, re.M) == ["2", "4"]
    start, *rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert start["event"] == "start" and start["step"] == 0 and start["world_size"] == 1
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[0]["samples_per_s"] > 0
    found = EventAccumulator(str(board))
    found.Reload()
    assert [e.step for e in found.Scalars("loss")] == [1, 2, 3, 4]
    assert [e.value for e in found.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
