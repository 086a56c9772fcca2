"""The commands as a user types them: what they print, the keys of --json, the exit status."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import GOOD, write_job
from programs import TWO_DEVICES
from warm_python import python

from mixmesh.__main__ import execute
from mixmesh.errors import InputError
from mixmesh.lang.plan_file import Plan

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A job, a cluster and two plans for it."""
    path = tmp_path_factory.mktemp("cli")
    write_job(path, GOOD)
    (path / "two.toml").write_text(TWO_DEVICES)
    for planner in ("ddp-even", "fsdp-even"):
        arguments = [str(path / "job.py"), "--cluster", str(path / "two.toml"), "--planner", planner]
        assert execute(["plan", *arguments, "--out", str(path / f"{planner}.plan")]) == 0
    return path


@pytest.fixture
def run(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)

    def run(text: str):
        capsys.readouterr()
        status = execute(text.split())
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return run


def last(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_plan(run, folder):
    out = run("plan job.py --cluster two.toml --program --out auto.plan")
    assert "\nprogram mlp world=2 {\n" in out
    for text in ("job.py:13", "# ", "candidate", "predicted step", "rank", "cpu@0.6", "written to auto.plan"):
        assert text in out, text
    plan = Plan.load(folder / "auto.plan")
    assert str(plan.program).split("\n")[0] in out
    assert {c.planner for c in plan.candidates} >= {"ddp-tuned", "single", "ddp-even", "fsdp-even"}
    assert plan.predicted_step_s == min(c.predicted_step_s for c in plan.candidates if c.feasible)


def test_plan_json(run):
    out = run("plan job.py:wide --cluster two.toml --planner ddp-even --json")
    found = last(out)
    assert {"planner", "feasible", "predicted_step_s", "predicted_peak_memory_bytes", "planning_s", "ratios",
            "candidates"} <= set(found)  # fmt: skip
    assert found["planner"] == "ddp-even" and found["feasible"] is True
    assert found["ratios"] == {"r0": [0.5, 0.5]} and len(found["predicted_peak_memory_bytes"]) == 2
    assert set(found["candidates"][0]) == {"planner", "feasible", "predicted_step_s"}


def test_show(run, folder):
    out = run("show ddp-even.plan")
    text = (folder / "ddp-even.plan").read_text()
    assert out.startswith(text[text.index("\nprogram ") + 1 :].rstrip())  # with its comments
    assert "planned by ddp-even" in out and "0.5000" in out


def test_show_reads_a_pipe(folder):
    """As in ``mixmesh show <(git show HEAD:x.plan)``: there is nothing to read a second time."""
    text = (folder / "ddp-even.plan").read_text()
    done = subprocess.run(
        [python(), "-m", "mixmesh", "show", "/dev/stdin"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("program mlp "), done.stderr


def test_letters_that_a_terminal_lacks_are_escaped(folder):
    text = (folder / "ddp-even.plan").read_text()
    (folder / "umlaut.plan").write_text(re.sub('cluster_name = ".*"', 'cluster_name = "Kästen"', text))
    done = mixmesh("show", "umlaut.plan", cwd=folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "K\\xe4sten" in done.stdout, done.stderr


def test_diff(run):
    out = run("diff ddp-even.plan fsdp-even.plan")
    assert "--- ddp-even.plan" in out and "\n+  " in out and " = all_gather(%up.weight" in out
    assert "planner           ddp-even  ->  fsdp-even" in out and "predicted step" in out
    same = run("diff ddp-even.plan ddp-even.plan")
    assert "the programs are the same" in same and "ratios and predictions are the same" in same


def test_simulate(run, folder):
    found = last(run("simulate ddp-even.plan --cluster two.toml --trace t.json --json"))
    plan = Plan.load(folder / "ddp-even.plan")
    assert found["predicted_step_s"] == pytest.approx(plan.predicted_step_s)
    assert len(found["predicted_peak_memory_bytes"]) == 2
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1} and {e["ph"] for e in events} == {"M", "X"}
    assert "predicted step" in run("simulate ddp-even.plan --cluster two.toml")


def test_the_plan_of_another_cluster_is_named(folder, capsys, monkeypatch):
    """A page on two plans did not say which one was meant."""
    monkeypatch.chdir(folder)
    (folder / "other.toml").write_text(TWO_DEVICES.replace("0.3", "0.4"))
    for words in ("simulate ddp-even.plan", "explain ddp-even.plan", "report ddp-even.plan fsdp-even.plan"):
        assert execute([*words.split(), "--cluster", "other.toml"]) == 2
        err = capsys.readouterr().err
        assert "made for another cluster" in err and "where    ddp-even.plan" in err


def test_an_edited_ratio_changes_the_prediction(run, folder):
    text = (folder / "ddp-even.plan").read_text()
    (folder / "edited.plan").write_text(text.replace("r0 = [0.5, 0.5]", "r0 = [0.7, 0.3]"))
    before = last(run("simulate ddp-even.plan --cluster two.toml --json"))["predicted_step_s"]
    after = last(run("simulate edited.plan --cluster two.toml --json"))["predicted_step_s"]
    assert after < before  # the second device has half the speed
    assert last(run("verify job.py --plan edited.plan --json"))["ok"]


def test_verify(run):
    found = last(run("verify job.py --cluster two.toml --planner fsdp-even --steps 2 --json"))
    assert {"ok", "max_loss_error", "max_gradient_error", "world_size", "unsupported_ops"} <= set(found)
    assert found["ok"] is True and found["world_size"] == 2 and found["unsupported_ops"] == []
    assert "equal" in run("verify job.py --plan ddp-even.plan")


def test_a_difference_is_exit_status_1(folder, capsys, monkeypatch):
    import mixmesh.measure.verification as verification

    monkeypatch.setattr(verification, "TOLERANCE_F64", -1.0)
    assert execute(["verify", str(folder / "job.py"), "--plan", str(folder / "ddp-even.plan"), "--json"]) == 1
    assert last(capsys.readouterr().out)["ok"] is False


def mixmesh(*arguments: str, cwd, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    return subprocess.run(
        [python(), "-m", "mixmesh", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["show", "ddp-even.plan"], ["diff", "ddp-even.plan", "fsdp-even.plan"],
     ["simulate", "ddp-even.plan", "--cluster", "two.toml"], ["plan", "--help"]],
)  # fmt: skip
def test_no_torch_where_none_is_needed(arguments, folder):
    code = "import sys; from mixmesh.__main__ import execute; s = execute(sys.argv[1:]);"
    code += "sys.exit(99 if 'torch' in sys.modules else s)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_command_imports_no_other(folder):
    code = "import sys; from mixmesh.__main__ import execute; s = execute(['show', 'ddp-even.plan']);"
    code += "print(*[name for name in sys.modules if name.startswith('mixmesh')], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    loaded = {*done.stderr.split()}
    assert "mixmesh.cli.show" in loaded
    assert not loaded & {"mixmesh.cli.run", "benchmarks.commands", "mixmesh.planner", "mixmesh.explain"}


def test_help_names_every_command(folder):
    out = mixmesh("--help", cwd=folder).stdout
    for command in (
        "plan",
        "show",
        "explain",
        "diff",
        "simulate",
        "report",
        "what-if",
        "verify",
        "profile",
        "run",
        "export",
        "testbed",
        "bench",
    ):
        assert f"\n  {command} " in out


def test_a_closed_pipe_is_no_error(folder):
    command = f"{sys.executable} -m mixmesh show ddp-even.plan | head -1"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    assert done.stdout.startswith("program mlp") and done.stderr == ""


@pytest.mark.parametrize(
    "words, status",
    [("show ddp-even.plan", 0), ("plan --help", 0), ("--version", 0), ("show no.plan", 2),
     ("simulate no.plan --cluster two.toml --json", 2), ("plan --json", 2)],
)  # fmt: skip
def test_a_pipe_that_nobody_reads(folder, words, status):
    """Ended with status 1, and errors as JSON with a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [python(), "-m", "mixmesh", *words.split()],
        cwd=folder,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert done.stderr.startswith("PlanError" if "no.plan" in words else "Usage" if status else "")


def test_run_in_the_testbed(folder):
    done = mixmesh(
        *"testbed --cluster two.toml -- mixmesh run job.py --plan fsdp-even.plan --steps 3 --json".split(),
        cwd=folder, MIXMESH_TESTBED_FORCE_PLAIN="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = last(done.stdout)
    assert {"step_s_median", "predicted_step_s", "losses", "peak_memory_bytes"} <= set(found)
    assert len(found["losses"]) == 3 and found["losses"][2] < found["losses"][0]
    assert found["emulation"] == "none" and len(found["peak_memory_bytes"]) == 2
    assert "cpu@0.3" in done.stderr


def test_profile_in_the_testbed_and_a_plan_by_it(folder):
    done = mixmesh(
        *"testbed --cluster two.toml -- mixmesh profile job.py --out p.json --budget 1 --json".split(),
        cwd=folder, MIXMESH_TESTBED_FORCE_PLAIN="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert last(done.stdout)["devices"]
    planned = mixmesh(*"plan job.py --cluster two.toml --profile p.json --json".split(), cwd=folder)
    assert planned.returncode == 0 and last(planned.stdout)["cost_source"] == "profile", planned.stderr


def test_the_testbed_refuses_the_plan_of_another_cluster(folder):
    (folder / "other.toml").write_text(TWO_DEVICES.replace("0.6", "0.5"))
    done = mixmesh(
        *"testbed --cluster other.toml -- mixmesh run job.py --plan ddp-even.plan".split(),
        cwd=folder, MIXMESH_TESTBED_FORCE_PLAIN="1",
    )  # fmt: skip
    assert done.returncode == 1 and "made for another cluster" in done.stderr
    assert "Traceback" not in done.stderr


def test_torchrun(folder):
    torchrun = [python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "mixmesh"]
    done = subprocess.run(
        [*torchrun, *"run job.py --plan ddp-even.plan --steps 2 --json".split()],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(last(done.stdout)["losses"]) == 2


def test_a_plan_whose_edit_names_another_parameter(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    text = (folder / "ddp-even.plan").read_text()
    (folder / "edited.plan").write_text(text.replace('param("up.weight")', 'param("up.wait")'))
    assert execute(["verify", "job.py", "--plan", "edited.plan"]) == 2
    err = capsys.readouterr().err
    assert err.startswith('PlanError: the plan loads param("up.wait"), which this job does not have')
    assert "expected up.weight" in err and "edited.plan:" in err


def test_a_plan_begins_with_its_headline(run):
    out = run("plan job.py --cluster two.toml --planner ddp-even")
    assert re.match(r"2 devices in \d machines?: ddp-even, \d+ / \d+ samples, [\d.]+ ms", out)
    assert "program mlp" not in out
    assert "program mlp" in run("plan job.py --cluster two.toml --planner ddp-even --program")


@pytest.mark.parametrize("program", ("mixmesh bench", "benchmarks"))
def test_the_comparisons_stand_beside_the_package(folder, program):
    """``mixmesh bench`` is ``python -m benchmarks`` in a checkout of the repository."""
    command = [sys.executable, "-m", *program.split(), "planning", "--help"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Usage: python -m benchmarks planning [OPTIONS]")


def test_an_installed_package_says_where_the_comparisons_are(tmp_path):
    shutil.copytree(ROOT / "mixmesh", tmp_path / "installed" / "mixmesh")
    ended = mixmesh("bench", "planning", "--quick", cwd=tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    assert ended.returncode == InputError.exit_status
    assert "cd CHECKOUT && python -m benchmarks planning --quick" in ended.stderr


JSON_PAGE = (ROOT / "docs/reference/json.md").read_text()


def test_the_fields_of_a_plan_are_those_of_the_page(run):
    entry = re.search(r"^- plan: (.*?)\n- ", JSON_PAGE, re.MULTILINE | re.DOTALL)[1]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", entry))))
    assert set(last(run("plan job.py --cluster two.toml --planner ddp-even --json"))) <= named
