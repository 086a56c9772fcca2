"""Mutated plans, cluster files, profiles, journals and checkpoints: each loads, or is refused with a
MixmeshError.

What loads is used: checked, printed, simulated, explained, verified. All of it happens in a child process
with limits on memory and on the time of a case, so that a hang or an exhausted memory is a finding too.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from mixmesh.cli.plan import summary
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Profile
from mixmesh.errors import MixmeshError
from mixmesh.explain import explain_plan
from mixmesh.lang.check import check_loaded
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.testbed import journal
from mixmesh.measure.verification import verify
from mixmesh.simulator import simulate

from . import checkpoints, seeds
from .mutate import ANY, OF_PLANS, mutate
from .report import Failure, Progress, Report, case_seeds, silent

KIND = "files"
CASE_LIMIT_S = 30.0  # of computing
STILL_LIMIT_S = 300.0
MEMORY_BYTES = 6 * 2**30  # of address space above what the imports took
VERIFIED = 0.3  # share of the plans that load
WEIGHTS = {"plan": 12, "cluster": 4, "profile": 3, "journal": 1, "checkpoint": 8}


def use_plan(text: str, model: str, rng: random.Random) -> None:
    """All that the commands do with a plan, but for training it."""
    plan = Plan.parse(text, "x.plan")
    check_loaded(plan, "x.plan")
    again = Plan.parse(str(plan), "again.plan")
    assert again.program == plan.program, "the plan does not read back as it was printed"
    cluster = Cluster.parse(seeds.CLUSTER)
    plan = replace(plan, cluster_fingerprint=cluster.fingerprint)
    summary(plan, cluster)
    costs = CostModel(cluster, _read_profile(seeds.profile()) if rng.random() < 0.3 else None)
    simulate(plan.program, costs, micro_batches=plan.micro_batches, events=True)
    explain_plan(plan, cluster)
    if rng.random() < VERIFIED:
        known = seeds.models()[model]
        verify(known.module, known.batch, plan, traced=known.traced, where="x.plan")


def use_cluster(text: str, rng: random.Random) -> None:
    cluster = Cluster.parse(text)
    name, plan_text = rng.choice(seeds.plans())
    plan = Plan.parse(plan_text)
    if cluster.world_size == plan.program.world_size:
        simulate(plan.program, CostModel(cluster), micro_batches=plan.micro_batches)
    str(cluster)


def use_profile(text: str, rng: random.Random) -> None:
    profile = _read_profile(text)
    name, plan_text = rng.choice(seeds.plans())
    plan = Plan.parse(plan_text)
    costs = CostModel(Cluster.parse(seeds.CLUSTER), profile)
    timeline = simulate(plan.program, costs, micro_batches=plan.micro_batches)
    assert timeline.step_s == timeline.step_s, "the predicted step is no number"


def use_journal(text: str, rng: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mm01234567.json"
        path.write_text(text)
        found = journal.load(path)
        assert found is None or isinstance(found.is_stale, bool)


def _read_profile(text: str) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json"
        path.write_text(text)
        return Profile.load(path)


def make_case(case_seed: int) -> tuple[str, str, Callable[[], None]]:
    """The kind of file, its text, and what is done with it."""
    rng = random.Random(case_seed)
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if kind == "plan":
        model, text = rng.choice(seeds.plans())
        text = mutate(text, rng, OF_PLANS)
        return kind, text, lambda: use_plan(text, model, rng)
    if kind == "checkpoint":
        return kind, *checkpoints.make_case(rng)
    original, use = {
        "cluster": (seeds.CLUSTER, use_cluster),
        "profile": (seeds.profile(), use_profile),
        "journal": (seeds.JOURNAL, use_journal),
    }[kind]
    text = mutate(original, rng, ANY)
    return kind, text, lambda: use(text, rng)


def outcome_of(use: Callable[[], None]) -> tuple[str, str]:
    """What came of it, and for a failure the last line and place of its traceback."""
    try:
        use()
    except MixmeshError as error:
        str(error)
        return "refused", ""
    except Exception as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if "mixmesh" in f.filename]
        place = f"{own[-1].filename.partition('mixmesh/')[2]}:{own[-1].lineno}" if own else "?"
        return "TRACEBACK", f"{type(error).__name__}: {str(error)[:200]!r} at {place}"
    return "used", ""


def run_cases(seed: int, until_time_s: float, told: Progress = silent) -> Report:
    """Tries cases until ``time.monotonic()`` is ``until_time_s``."""
    report = Report(KIND)
    seeds.plans(), seeds.profile()  # before the children are made, who then have them
    coming = case_seeds(seed)
    first = next(coming)
    while first is not None and time.monotonic() < until_time_s:
        first = _run_child(first, until_time_s, report, told)
    return report


def _run_child(first: int, until_time_s: float, report: Report, told: Progress) -> int | None:
    """Cases from ``first`` on in a child; where to go on, or None at the end of the time."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _serve(first, until_time_s, writing)
    os.close(writing)
    case, what = first, ""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready = _waits_for(pid, pipe)
            line = pipe.readline() if ready else b""
            if not line:
                what = "the process died" if ready else f"more than {CASE_LIMIT_S:g} s"
                break
            case, result, what = json.loads(line)
            if result == "end":
                os.waitpid(pid, 0)
                return None
            if result != "start":
                _note(report, case, result, what)
                told(f"{report.num_cases} cases, {len(report.failures)} failures")
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    _note(report, case, "HANG", f"{what} (status {status})")
    return case + 1


def _waits_for(pid: int, pipe) -> bool:
    """Whether a child says something before its case has computed for too long, or stood still for much
    longer: on a machine with too much to do it may stand still for a while."""
    child = psutil.Process(pid)
    before_s, started = sum(child.cpu_times()[:2]), time.monotonic()
    while time.monotonic() < started + STILL_LIMIT_S:
        if select.select([pipe], [], [], 1.0)[0]:
            return True
        if sum(child.cpu_times()[:2]) - before_s > CASE_LIMIT_S:
            return False
    return False


def _note(report: Report, case: int, result: str, what: str) -> None:
    if not what:
        report.add(result)
        return
    kind, text, _ = make_case(case)
    report.add(result, Failure(f"{KIND}-{kind}", case, what, text, ".txt"))


def _serve(first: int, until_time_s: float, writing: int) -> None:
    """The child: one line at the start and at the end of each case."""
    sys.stderr = open(os.devnull, "w")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    case = first

    def say(*line) -> None:
        os.write(writing, (json.dumps(line) + "\n").encode())

    while time.monotonic() < until_time_s:
        say(case, "start", "")
        _, _, use = make_case(case)
        say(case, *outcome_of(use))
        case += 1
    say(case, "end", "")
    os._exit(0)


def replay(case_seed: int) -> Report:
    """Repeats one case in this process."""
    report = Report(KIND)
    _, _, use = make_case(case_seed)
    _note(report, case_seed, *outcome_of(use))
    return report
