"""Bad input: what a user sees is a message with a place and a next step, never a traceback."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import GOOD, HEAD, returning, write_job
from programs import MLP, THREE_DEVICES, TWO_DEVICES, make_plan
from torch import nn

import mixmesh
from mixmesh.__main__ import execute
from mixmesh.base.launched import rank_and_world_size
from mixmesh.cli.told import is_first_to_tell
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, JobError, MixmeshError
from mixmesh.frontend.job import batch_size, load_job, needs_whole_parameters, optimizer_states
from mixmesh.lang.ir import REPLICATE, parse_program
from mixmesh.lang.optimizer_states import ADAM, OptimizerStates
from mixmesh.lang.plan_file import Plan
from mixmesh.planner import check_planner
from mixmesh.runtime.comm import Comm


@pytest.fixture
def two(tmp_path):
    (tmp_path / "two.toml").write_text(TWO_DEVICES)
    return str(tmp_path / "two.toml")


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line: its status, stdout and stderr. No error leaves a traceback."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str):
        capsys.readouterr()
        status = execute(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err and "bug in mixmesh" not in err, err
        return status, out, err

    return run


def test_every_error_pickles():
    error = JobError("m", expected="e", got="g", where="w", hint=("a", "b"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and type(again) is JobError and again.exit_status == 2
    assert str(MixmeshError("only this")) == "only this"


# --- jobs --------------------------------------------------------------------------------------------------

# the text of the file, the message, the place (a line of the file), what helps
BAD_FILES = {
    "not python": ("def job(:\n", "is not Python: ", 1, ""),
    "import": ("import torch\nimport no_such_module\n", "No module named 'no_such_module'", 2, ""),
    "at import": ("x = 1\n\ny = x / 0\n", "ZeroDivisionError", 3, ""),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2, ""),
    "no function": (HEAD + "def jobs():\n    pass\n", "has no function job", None, "job.py:jobs"),
    "no function at all": ("x = 1\n", "has no function job", None, ""),
    "no callable": (HEAD + "job = 3\ndef make():\n    pass\n", "is not a function", None, "job.py:make"),
    "arguments": (HEAD + "def job(size):\n    pass\n", "cannot be called without arguments", 19, ""),
    "raises": (HEAD + "def job():\n    raise ValueError('no data here')\n", "no data here", 20, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_job_files(case, tmp_path):
    text, message, line, hint = BAD_FILES[case]
    path = write_job(tmp_path, text)
    with pytest.raises(JobError) as caught:
        load_job(path)
    error = caught.value
    assert message in error.message
    assert line is None or f"job.py:{line}" in error.where
    assert hint in " ".join(error.hint)


def test_job_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path, name="train.py")
    for name, message, hint in (
        ("tran.py", "there is no file tran.py", "train.py"),
        ("nowhere/train.py:job", "there is no file", ""),
        (".", "is a folder", "train.py"),
        ("train.py:a-b", "is no name of a function", "train.py:job"),
        ("train.py:wade", "has no function wade", "train.py:wide"),
    ):
        with pytest.raises(JobError, match=message) as caught:
            load_job(name)
        assert hint in " ".join(caught.value.hint), (name, caught.value.hint)
    assert load_job("train.py:wide").model.up.out_features == 64
    for name, hint in (("s.plan", "mixmesh show s.plan"), ("c.toml", "--cluster c.toml")):
        (tmp_path / name).write_text("[[machine]]\na: b = 1 c\n")
        with pytest.raises(JobError, match="is not Python") as caught:
            load_job(name)
        assert hint in caught.value.hint[0]
    for data in (b"\x80\x81\x00", b"a = 1\x00", b"\x80"):
        (tmp_path / "bytes.py").write_bytes(data)
        with pytest.raises(JobError, match=r"is not Python: (it is not text|.*codec)") as caught:
            load_job("bytes.py")
        assert caught.value.where.startswith("bytes.py"), data


# what job() returns, the message, what was got
BAD_RETURNS = {
    "None": ("None", "does not return a job", "None"),
    "a model": ("MLP()", "does not return a job", "a model alone (MLP)"),
    "a tuple": ("MLP(), batch()", "does not return a job", "a tuple of MLP, dict"),
    "no module": ("mixmesh.Job(lambda x: x, batch())", "whose model is no module", "a function"),
    "a class": ("mixmesh.Job(MLP, batch())", "whose model is no module", "the class MLP"),
    "no parameters": ("mixmesh.Job(nn.ReLU(), batch())", "without parameters", "ReLU"),
    "a tensor": ("mixmesh.Job(MLP(), torch.ones(3))", "batch of the wrong kind", "a tensor of shape [3]"),
    "a set": ("mixmesh.Job(MLP(), {1, 2})", "batch of the wrong kind", "a set"),
    "no tensors": ("mixmesh.Job(MLP(), {'x': 3})", "batch without tensors", "a dict with x"),
    "nothing": ("mixmesh.Job(MLP(), {})", "batch without tensors", "nothing"),
    "sizes": ("mixmesh.Job(MLP(), dict(batch(), y=torch.ones(7)))", "differ in dim 0", "['y'] [7]"),
    "empty": ("mixmesh.Job(MLP(), batch(0))", "an empty batch", "[0, 8]"),
    "keys": ("mixmesh.Job(MLP(), {0: torch.ones(3)})", "a key that is no name", "0"),
    "optimizer": ("mixmesh.Job(MLP(), batch(), optimizer='adam')", "optimizer cannot be called", "a str"),
    "scheduler": ("mixmesh.Job(MLP(), batch(), scheduler='cosine')", "scheduler cannot be called", "a str"),
    "made optimizer": (
        "mixmesh.Job(MLP(), batch(), optimizer=torch.optim.SGD(MLP().parameters(), lr=1))",
        "optimizer cannot be called", "a SGD",
    ),
    "data": ("mixmesh.Job(MLP(), batch(), data=3)", "cannot be iterated over", "an int"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RETURNS)
def test_what_a_job_returns(case, tmp_path):
    expression, message, got = BAD_RETURNS[case]
    with pytest.raises(JobError) as caught:
        load_job(write_job(tmp_path, returning(expression)))
    assert message in caught.value.message and got in caught.value.got
    assert "job.py:20" in caught.value.where and caught.value.expected


def test_good_jobs(tmp_path):
    job = load_job(write_job(tmp_path))
    assert batch_size(job.batch) == 12 and optimizer_states(job.optimizer, job.model) == OptimizerStates(0)
    scalars = load_job(
        write_job(tmp_path, returning("mixmesh.Job(MLP(), dict(batch(), t=torch.tensor(3.0)))"), "a.py")
    )
    assert batch_size(scalars.batch) == 12
    (tmp_path / "helper.py").write_text("SIZE = 5\n")
    text = returning("mixmesh.Job(MLP(), batch(__import__('helper').SIZE))")
    assert batch_size(load_job(write_job(tmp_path, text, "b.py")).batch) == 5


def test_optimizer_states():
    import torch

    def states(optimizer, dtype=torch.float32):
        return optimizer_states(optimizer, torch.nn.Linear(2, 2, dtype=dtype))

    assert states(torch.optim.AdamW) == states(None) == ADAM
    assert states(lambda p: torch.optim.SGD(p, lr=1, momentum=0.9)) == OptimizerStates(1)
    # not fused: Adam makes two tensors, the others one at most
    assert states(lambda p: torch.optim.Adam(p, foreach=False)) == OptimizerStates(2, 2)
    assert states(lambda p: torch.optim.Adam(p, fused=True)) == OptimizerStates(2)
    assert states(lambda p: torch.optim.Adagrad(p)) == OptimizerStates(1, 1)
    assert states(torch.optim.Adafactor) == OptimizerStates(0, 1)  # rows and columns
    assert states(lambda p: 1 / 0) == OptimizerStates(2, 2)

    class Keeps(torch.optim.SGD):
        """Two tensors of one dtype for each parameter."""

        def __init__(self, params, dtype):
            super().__init__(params)
            self.dtype = dtype

        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p] = {name: torch.zeros_like(p, dtype=self.dtype) for name in ("m", "v")}

    for dtype, of, kept in (
        (torch.int8, torch.float32, 0.5),
        (torch.float32, torch.float32, 2),
        (torch.float32, torch.bfloat16, 4),
    ):
        assert states(lambda p, dtype=dtype: Keeps(p, dtype), of) == OptimizerStates(kept, 2)


def test_optimizers_that_look_at_whole_parameters():
    import torch

    assert needs_whole_parameters(torch.optim.Adafactor)
    assert not needs_whole_parameters(torch.optim.AdamW) and not needs_whole_parameters(None)
    assert not needs_whole_parameters(lambda p: 1 / 0)


# --- commands ----------------------------------------------------------------------------------------------


def test_a_job_that_is_missing(run, tmp_path, two):
    out = tmp_path / "x.plan"
    status, _, err = run("plan", str(tmp_path / "no.py"), "--cluster", two, "--out", str(out))
    assert status == 2 and err.startswith("JobError: there is no file") and not out.exists()


def test_a_wrong_return_as_json(run, tmp_path, two):
    job = write_job(tmp_path, returning("MLP()"))
    status, out, err = run("plan", job, "--cluster", two, "--json")
    error = json.loads(out.splitlines()[-1])["error"]
    assert status == 2 and error["type"] == "JobError" and "JobError" in err
    assert error["message"] == "job() does not return a job" and "job.py" in error["where"]


# bodies of a forward(self, x, y)
MODELS = {
    "decides": "if x.sum() > 0:\n            x = x + 1\n        return self.a(x).sum()",
    "no loss": "return self.a(x)",
    "fails": "return self.b(x).sum()",
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_traced(case, run, tmp_path, two):
    text = f"{HEAD}\nclass Bad(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    text += f"        self.a = nn.Linear(8, 4)\n\n    def forward(self, x, y):\n        {MODELS[case]}\n\n"
    text += "def job():\n    return mixmesh.Job(Bad(), batch())\n"
    path = tmp_path / "x.plan"
    status, out, err = run("plan", write_job(tmp_path, text), "--cluster", two, "--out", str(path), "--json")
    assert status == 1 and "TraceError: " in err and "job.py:" in err
    assert json.loads(out.splitlines()[-1])["error"]["type"] == "TraceError"
    assert not list(tmp_path.glob("x.plan*"))


def test_a_batch_too_small_for_a_planner(run, tmp_path, two):
    """One sample is planned; a planner that deals samples out between machines says that it cannot."""
    job = write_job(tmp_path, returning("mixmesh.Job(MLP(), batch(1))"))
    status, _, _ = run("plan", job, "--cluster", two)
    assert status == 0
    status, _, err = run("plan", job, "--cluster", two, "--planner", "two-level")
    assert status == 2 and "a batch to be dealt out" in err


SMALL = {"0.6": "cpu_share = 0.6, memory_gib = 0.01", "0.3": "cpu_share = 0.3, memory_gib = 0.01"}


@pytest.mark.parametrize("ranks", ["1", "0, 1"])
def test_a_cluster_with_devices_too_small_for_any_process(run, tmp_path, ranks):
    small = TWO_DEVICES.replace("cpu_share = 0.3", SMALL["0.3"])
    if ranks != "1":
        small = small.replace("cpu_share = 0.6", SMALL["0.6"])
    (tmp_path / "small.toml").write_text(small)
    out = tmp_path / "x.plan"
    arguments = ("plan", write_job(tmp_path), "--cluster", str(tmp_path / "small.toml"), "--out", str(out))
    status, text, err = run(*arguments, "--json")
    assert status == 1 and err.startswith("Infeasible: no plan fits in memory") and not out.exists()
    alone = "try      a cluster file without rank 1,"
    assert (alone if ranks == "1" else "holds nothing fits on none of ranks 0, 1") in err
    assert "for its process alone" in err and "smaller global batch" not in err
    assert json.loads(text.splitlines()[-1])["error"]["type"] == "Infeasible"


def test_cluster_files(run, tmp_path):
    job = write_job(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text(TWO_DEVICES.replace("cpu_share", "cpu_shar", 1))
    for cluster in (str(tmp_path / "none.toml"), str(bad), str(tmp_path)):
        status, _, err = run("plan", job, "--cluster", cluster)
        assert status == 2 and err.startswith("ClusterError: ") and cluster in err


def test_an_unknown_planner(run, tmp_path, two):
    status, _, err = run("plan", write_job(tmp_path), "--cluster", two, "--planner", "ddp-evn")
    assert status == 2 and "unknown planner 'ddp-evn'" in err and "--planner ddp-even" in err


def test_an_optimizer_that_no_plan_can_step(run, tmp_path, two):
    job = write_job(tmp_path, returning("mixmesh.Job(MLP(), batch(), optimizer=torch.optim.LBFGS)"))
    status, _, err = run("plan", job, "--cluster", two, "--planner", "fsdp-even")
    assert status == 2 and "LBFGS is not supported" in err and "AdamW(model.parameters()" in err
    assert "auto" not in err


def test_hints_are_spelled_where_the_caller_is(run, tmp_path, two):
    """As options on the command line, as keyword arguments in Python."""
    command, python = "--planner ddp-even", 'planner="ddp-even"'
    arguments = ("plan", write_job(tmp_path), "--cluster", two, "--planner", "ddp-evn", "--json")
    status, out, err = run(*arguments)
    assert json.loads(out.splitlines()[-1])["error"]["hint"] == [command]
    assert status == 2 and command in err and python not in err
    with pytest.raises(InputError) as caught:
        check_planner("ddp-evn")
    assert python in str(caught.value) and command not in str(caught.value)


def test_an_optimizer_that_needs_whole_parameters(run, tmp_path, two):
    """Is planned around, and refused where a planner cuts parameters."""
    job = write_job(tmp_path, returning("mixmesh.Job(MLP(), batch(), optimizer=torch.optim.Adafactor)"))
    status, out, err = run("plan", job, "--cluster", two, "--planner", "fsdp-even")
    assert status == 1 and "cuts parameters, and the job's optimizer steps whole ones only" in err
    assert "--planner auto" in err and "AdamW" in err
    path = tmp_path / "x.plan"
    status, out, err = run("plan", job, "--cluster", two, "--out", str(path), "--json")
    fits = {c["planner"]: c["feasible"] for c in json.loads(out.splitlines()[-1])["candidates"]}
    assert status == 0 and not fits["fsdp-even"] and fits["ddp-even"] and fits["ddp-tuned"]
    assert all(i.type.placement == REPLICATE for i in Plan.load(path).program.params)


def test_an_exact_search_without_time(run, tmp_path, two):
    """Is refused before the job is read."""
    for seconds in ("0", "nan", "-1"):
        status, _, err = run("plan", str(tmp_path / "no.py"), "--cluster", two, "--exact", seconds)
        assert status == 2 and "the exact search has no time" in err and f"got      {float(seconds)}" in err


def test_a_search_without_end(run, tmp_path, two):
    """Ran for ever."""
    for option in ("--search-seconds", "--exact"):
        status, _, err = run("plan", str(tmp_path / "no.py"), "--cluster", two, option, "inf")
        assert status == 2 and "would not end" in err and f"try      {option} " in err


def test_a_planner_in_capitals(run, tmp_path, two):
    status, _, err = run("plan", str(tmp_path / "no.py"), "--cluster", two, "--planner", "HAP")
    assert status == 2 and "try      --planner hap" in err


def test_a_cluster_file_that_is_not_there(run, tmp_path, two):
    missing = str(Path(two).with_name("tow.toml"))
    status, _, err = run("plan", "job.py", "--cluster", missing)
    assert status == 2 and f"try      --cluster {two}" in err
    status, _, err = run("plan", "job.py", "--cluster", "lab-of-ours.toml")
    assert status == 2 and "mixmesh detect --out lab-of-ours.toml" in err


def test_a_profile_that_is_none(run, tmp_path, two):
    (tmp_path / "p.json").write_text("{}")
    status, _, err = run("plan", write_job(tmp_path), "--cluster", two, "--profile", str(tmp_path / "p.json"))
    assert status == 2 and "this is not a profile" in err


def test_a_run_does_not_ignore_a_profile(run, tmp_path):
    status, _, err = run("run", write_job(tmp_path), "--profile", "p.json")
    assert status == 2 and "expected --profile beside --plan" in err
    status, _, err = run("run", write_job(tmp_path), "--plan", "x.plan", "--planner", "hap")
    assert status == 2 and "expected --plan or --planner" in err


def test_a_plan_that_cannot_be_written(run, tmp_path, two):
    out = tmp_path / "nowhere" / "x.plan"
    arguments = ("plan", write_job(tmp_path), "--cluster", two, "--planner", "single", "--out", str(out))
    status, _, err = run(*arguments)
    assert status == 2 and "cannot write the plan" in err and f"mkdir -p {out.parent}" in err


@pytest.mark.parametrize("command", ["plan job.py --cluster c.toml --out", "report x.plan --out",
                                     "detect --out", "calibrate --out",
                                     "run job.py --steps 9 --trace"])  # fmt: skip
def test_a_missing_folder_is_told_before_the_work(command, run):
    """The job, the cluster and the plan of these commands are not even looked for."""
    status, _, err = run(*command.split(), "nowhere/x")
    assert status == 2 and "cannot write the " in err and "mkdir -p nowhere" in err
    status, _, err = run(*command.split(), ".")
    assert status == 2 and "Is a directory" in err


def test_profile_and_tune_say_how_to_describe_the_cluster(run, monkeypatch):
    monkeypatch.delenv("MIXMESH_CLUSTER", raising=False)
    for command in ("profile", "tune"):
        status, _, err = run(command, "job.py", "--out", "x")
        assert (
            status == 2 and "mixmesh detect --out C.toml" in err and "job.py --cluster C.toml --out x" in err
        )


@pytest.fixture
def plan(tmp_path):
    """A plan for three devices, and of no job here."""
    path = tmp_path / "x.plan"
    make_plan(parse_program(MLP), Cluster.parse(THREE_DEVICES)).save(path)
    return path


def test_a_plan_for_another_cluster(run, plan, two):
    status, out, err = run("simulate", str(plan), "--cluster", two, "--json")
    assert status == 2 and "made for another cluster" in err and "3 devices, not 2" in err
    assert json.loads(out.splitlines()[-1])["error"]["type"] == "PlanError"


def test_a_plan_for_another_model(run, plan, tmp_path):
    status, _, err = run("verify", write_job(tmp_path), "--plan", str(plan))
    assert status == 2 and "made for another model" in err and "parameter up.weight" in err


def test_an_edited_plan(run, plan, tmp_path):
    (tmp_path / "three.toml").write_text(THREE_DEVICES)
    text = plan.read_text()
    plan.write_text(text.replace("all_gather", "all_reduce"))
    line = next(n for n, row in enumerate(text.split("\n"), 1) if "all_gather" in row)
    for command in (("show", str(plan)), ("simulate", str(plan), "--cluster", str(tmp_path / "three.toml"))):
        status, _, err = run(*command)
        assert status == 1 and f"x.plan:{line}: %h.r = all_reduce(%h)" in err and "expected all_gather" in err
    plan.write_text(text.replace("all_gather(%h)", "all_gather(%q)"))
    status, _, err = run("show", str(plan))
    assert status == 2 and f"x.plan:{line}:" in err and "^" in err


def test_micro_batches_that_were_added(run, plan):
    text = plan.read_text()
    plan.write_text(
        text.replace("program_digest", "micro_batches = [[1, 7, 1], [1, 7, 1], [1, 7, 1]]\nprogram_digest")
    )
    status, _, err = run("show", str(plan))
    assert status == 2 and "micro-batches cannot run this program" in err
    plan.write_text(text)
    assert run("show", str(plan))[0] == 0


def test_what_is_no_plan(run, tmp_path):
    (tmp_path / "a.plan").write_text("hello\n")
    (tmp_path / "b.plan").write_text("mixmesh_plan = 99\nprogram x world=1 {\n")
    for name in ("a.plan", "b.plan", "none.plan", "."):
        status, _, err = run("show", str(tmp_path / name))
        assert status == 2 and err.startswith("PlanError: "), (name, err)


def test_running_outside_of_torchrun(run, plan, tmp_path, monkeypatch):
    job = write_job(tmp_path)
    status, _, err = run("run", job, "--plan", str(plan))
    assert (
        status == 2
        and f"torchrun --nproc-per-node 3 -m mixmesh run {job}" in err
        and "mixmesh testbed" in err
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = run("run", job, "--plan", str(plan))
    assert status == 2 and "WORLD_SIZE=2" in err


@pytest.mark.parametrize("rank, world_size", [("0", "two"), ("x", "1"), ("-1", "1"), ("2", None), ("0", "0")])
def test_an_environment_that_no_launcher_made(rank, world_size, run, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    got = f"RANK={rank}, " + ("no WORLD_SIZE" if world_size is None else f"WORLD_SIZE={world_size}")
    for command in ("run job.py", "detect"):
        status, _, err = run(*command.split())
        assert status == 2 and got in err and "unset RANK WORLD_SIZE" in err
    with pytest.raises(InputError, match=got):
        mixmesh.prepare(nn.Linear(1, 1), None, [])


def test_an_empty_size_of_a_launch_is_one_process(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert rank_and_world_size() == (0, 1)


def test_wrong_usage(run):
    for arguments in (("plan",), ("plans",), ("show", "--all", "x"), ("verify", "x.py", "--steps", "0")):
        status, out, err = run(*arguments, "--json")
        assert status == 2 and json.loads(out.splitlines()[-1])["error"]["message"], arguments
        assert "Usage: mixmesh" in err
    status, _, err = run("verify", "x.py")
    assert status == 2 and "--cluster C.toml, or --plan X.plan" in err


def test_options_that_would_have_no_effect(run, plan):
    status, _, err = run("verify", "x.py", "--plan", str(plan), "--planner", "hap", "--batch-norm", "local")
    assert status == 2 and "--planner, --batch-norm: the plan is already made" in err
    status, _, err = run("explain", str(plan), "--all-layers")
    assert status == 2 and "--tensor NAME" in err and f"mixmesh explain {plan} --tensor" in err


def test_our_own_bugs_are_one_line_and_a_file(capsys, monkeypatch, plan):
    import mixmesh.cli.show

    def fail(path):
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr(mixmesh.cli.show.Plan, "load", fail)
    assert execute(["show", str(plan)]) == 1
    _, err = capsys.readouterr()
    assert err.count("\n") == 1 and "this is a bug in mixmesh" in err and "ZeroDivisionError: oh no" in err
    path = err.split("traceback in ")[1].rstrip(")\n")
    with open(path) as file:
        assert "Traceback (most recent call last)" in file.read()
    os.unlink(path)


def test_an_interrupt(monkeypatch, plan, capsys):
    import mixmesh.cli.show

    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(mixmesh.cli.show.Plan, "load", interrupt)
    assert execute(["show", str(plan)]) == 130
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "interrupted\n")
    for run in (interrupt, lambda _: 130):  # typer returns a status
        assert execute(["simulate", str(plan), "--json"], run) == 130
        told = capsys.readouterr()
        assert told.err == "interrupted\n" and json.loads(told.out)["error"]["message"] == "interrupted"


def test_good_file_is_good(tmp_path):
    assert load_job(write_job(tmp_path, GOOD)).optimizer is not None


def test_a_text_is_told_once_in_a_start(monkeypatch, tmp_path):
    """Even if all ranks have the same error; again after a restart, and in another log."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    logs = [open(tmp_path / name, "w") for name in "ab"]  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", logs[0])
    assert [is_first_to_tell("a"), is_first_to_tell("a")] == [True, True]  # not by torchrun
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert [is_first_to_tell("a"), is_first_to_tell("a"), is_first_to_tell("b")] == [True, False, True]
    monkeypatch.setattr("sys.stderr", logs[1])
    assert is_first_to_tell("a") and not is_first_to_tell("a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_first_to_tell("a")
    for number in ("1", "two"):
        monkeypatch.setenv("WORLD_SIZE", number)
        assert is_first_to_tell("a") and is_first_to_tell("a")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert is_first_to_tell("a") and is_first_to_tell("a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody answers
    monkeypatch.setattr("mixmesh.cli.told.STORE_S", 0.2)
    assert is_first_to_tell("a") and is_first_to_tell("a")


def test_a_worker_of_a_loader_that_is_killed_is_named():
    """PyTorch raises its error in whatever the process does, which often is a collective."""
    channel = Comm(0, 1, torch.device("cpu"), 60.0, {}).channel((0,), "all_reduce")
    error = channel.failed(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    assert "by the end of a data loader's worker" in str(error)
    assert "killed by signal: Killed." in error.got and "/dev/shm" in error.hint[0]
