"""Pages of trainings, of benches, and of two things side by side; and what there is no page of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mixmesh.__main__ import execute
from mixmesh.base.run_log import mark_line, step_line
from mixmesh.errors import InputError
from mixmesh.explain.report import bench_page, page_text, run_page
from mixmesh.explain.report.recognise import Bench, Run, recognise
from mixmesh.explain.report.run_page import mark_rows

ROWS = [
    {"case": "a", "gpus": 2, "step_s": 0.5, "speedup": {"ddp": 1.5}, "met": True, "rounds_s": [1, 2]},
    {"case": "b", "gpus": 2, "step_s": 0.7, "speedup": {"ddp": 1.1}, "met": False, "rounds_s": [1, 2]},
]


def log_text(step_s: float = 0.2) -> str:
    """Four steps, the last two of which are undone by a start after a checkpoint."""
    facts = {"world_size": 2, "planner": "hap", "predicted_step_s": 0.1, "bound_s": 0.05}
    lines = [mark_line("start", 0, 1.0, **facts)]
    lines += [step_line(n, 3.0 - n / 10, step_s, 32 / step_s, 1.0) for n in range(1, 5)]
    lines.insert(3, mark_line("checkpoint", 2, 1.0))
    lines.append(mark_line("start", 2, 2.0, **facts))
    lines += [step_line(n, 3.0 - n / 10, step_s, 32 / step_s, 2.0) for n in range(3, 7)]
    lines += [mark_line("own", 6, 2.0, own_s=[0.1, 0.15]), mark_line("shares", 6, 2.0, pause_s=0.4)]
    return "".join(lines)


def bench(tmp_path: Path, name: str, factor: float = 1.0) -> Bench:
    rows = [{**row, "step_s": factor * row["step_s"]} for row in ROWS]
    made = {"bench": "x", "command": "python -m benchmarks x", "revision": "abc", "cases": rows}
    (tmp_path / name).write_text(json.dumps({**made, "targets": 2, "targets_met": 1}))
    found = recognise(tmp_path / name)
    assert isinstance(found, Bench)
    return found


def test_a_folder_of_checkpoints(tmp_path):
    (tmp_path / "000001-step-2").mkdir()
    (tmp_path / "run.jsonl").write_text(log_text())
    run = recognise(tmp_path)
    assert isinstance(run, Run) and run.kept_steps == (2,)
    page = run_page([run])
    assert page.sentences == [
        "6 steps, loss 2.9 to 2.4; a step takes 200 ms (median).",
        "100 ms were predicted (2.00x), and 25% of the rate that no plan can exceed was reached.",
        "It was started again from step 2; 2 steps were made twice.",
        "1 checkpoint, the newest after step 2.",
        "Shares followed the devices' speeds after step 6.",
        "At the end rank 1 worked longest, 50 ms a step more than the fastest.",
    ]
    text = page_text(page)
    assert "2 steps made again" in text and "still there" in text and "@@" not in text
    assert page.data["runs"][0]["marks"] == [["start", 0], ["checkpoint", 2], ["start", 2], ["shares", 6]]
    assert [point[0] for point in page.data["runs"][0]["points"]] == [1, 2, 3, 4, 5, 6]


def test_faults_and_plans_are_marked_with_their_cause(tmp_path):
    """Rank 1 is lost in step 4, which two survivors tell; three devices go on, and later follow a speed."""
    four = {"world_size": 4, "planner": "hap", "predicted_step_s": 0.1}
    three = {"world_size": 3, "planner": "ddp-tuned", "predicted_step_s": 0.12}
    why = "has ended without a message: no sign of life"
    cause = "compared with the others, device 2 takes 1.90x as long as planned"
    lines = [mark_line("start", 0, 1.0, **four)]
    lines += [step_line(n, 3.0, 0.2, 160, 1.0) for n in range(1, 4)]
    lines += [mark_line("fault", 3, 1.0, rank=1, device='T4-16GB of machine "b"', why=why)] * 2
    lines += [mark_line("fault", 3, 1.0, why="rank 1 has ended, and the others wait for it")]
    lines += [mark_line("start", 2, 2.0, **three)]
    lines += [step_line(n, 3.0, 0.2, 160, 1.0) for n in range(3, 7)]
    lines += [mark_line("plan", 6, 2.0, **three | {"planner": "hap"}, cause=cause)]
    lines += [
        mark_line("shares", 6, 2.0, pause_s=0.4, cause=cause),
        mark_line("stop", 6, 2.0, cause="SIGTERM"),
    ]
    (tmp_path / "run.jsonl").write_text("".join(lines))
    page = run_page([recognise(tmp_path / "run.jsonl")])
    lost = 'rank 1 (T4-16GB of machine "b")'
    assert page.sentences[2:] == [
        f"After step 3 {lost} was lost: it {why}.",
        "It was started again from step 2; 1 step was made twice.",
        f"Training went on with another plan after step 6: {cause}.",
        f"Shares followed the devices' speeds after step 6: {cause}.",
        "It was stopped by SIGTERM after step 6.",
    ]
    marks = page.data["runs"][0]["marks"]
    assert [event for event, _ in marks] == ["start", "fault", "start", "plan", "shares", "stop"]
    assert mark_rows(recognise(tmp_path / "run.jsonl")) == [
        ("0", "start", "4 devices, planned by hap, 100 ms a step predicted"),
        ("3", "fault", f"{lost}: {why}"),
        ("2", "start", "3 devices (before: 4), planned by ddp-tuned (before: hap), 120 ms a step predicted "
         "(before: 100 ms), 1 step made again"),
        ("6", "new plan", f"3 devices, planned by hap (before: ddp-tuned), 120 ms a step predicted, {cause}"),
        ("6", "new shares", f"{cause}, took 400 ms"),
        ("6", "stopped", "SIGTERM"),
    ]  # fmt: skip


def test_two_trainings(tmp_path):
    for name, step_s in (("a.jsonl", 0.2), ("b.jsonl", 0.1)):
        (tmp_path / name).write_text(log_text(step_s))
    page = run_page([recognise(tmp_path / "a.jsonl"), recognise(tmp_path / "b.jsonl")])
    assert page.sentences[0] == "b.jsonl is 2x as fast as a.jsonl: 100 ms a step, and 200 ms there."
    assert page.sentences[1].startswith("After step 6, the last that both made, the loss is 2.4 in a.jsonl")
    assert [run["name"] for run in page.data["runs"]] == ["a.jsonl", "b.jsonl"]


def test_the_results_of_a_bench(tmp_path):
    page = bench_page([bench(tmp_path, "r.json")])
    assert page.sentences == [
        "2 rows, made by python -m benchmarks x, revision abc.",
        "1 of 2 targets are met.",
    ]
    assert page.data["labels"] == ["a", "b"] and page.data["figures"] == ["step_s", "speedup ddp"]
    assert page.data["benches"][0]["values"]["speedup ddp"] == [1.5, 1.1]
    assert "<td>yes</td>" in page_text(page)


def test_two_benches_differ_where_their_rows_do(tmp_path):
    page = bench_page([bench(tmp_path, "r.json"), bench(tmp_path, "s.json", 2.0)])
    assert page.sentences[0].startswith("Of 2 rows that both have, 2 differ in step_s by more than 2% from r")
    assert "b: step_s 0.7, then 1.4 (2.00x)." in page.sentences


def test_what_there_is_no_report_of(tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    (tmp_path / "x.json").write_text('{"bench": "empty", "rows": []}')
    (tmp_path / "empty").mkdir()
    for name in ("x.txt", "x.json", "empty", "missing"):
        with pytest.raises(InputError, match="there is no report of this") as caught:
            recognise(tmp_path / name)
        assert "a plan (mixmesh plan --out X.plan)" in str(caught.value)


def test_the_command_refuses_what_does_not_belong_together(tmp_path, capsys):
    bench(tmp_path, "r.json")
    (tmp_path / "a.jsonl").write_text(log_text())
    out = ["--out", str(tmp_path / "r.html")]
    assert execute(["report", str(tmp_path / "r.json"), str(tmp_path / "a.jsonl"), *out]) == 2
    assert "only two of one kind" in capsys.readouterr().err
    assert execute(["report", str(tmp_path / "r.json"), "--what-if", *out]) == 2
    assert "belong to a plan" in capsys.readouterr().err
    assert execute(["report", str(tmp_path / "r.json"), *out]) == 0
    assert (tmp_path / "r.html").stat().st_size > 1e6
