"""ZeRO on unequal devices: our allocation against equal and proportional parts, PyTorch's own data
parallelism, and the fast devices alone. Measured in the testbed, with its memory limits, and simulated at
the size of the paper.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.errors import MixmeshError
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.trace import trace
from mixmesh.lang.optimizer_states import ADAM

from . import jobs
from .measure import DEMO_CLUSTER, call, each_case, named
from .poplar_cases import (
    FIRST_STEP,
    FULL,
    GLOBAL_BATCH,
    MEASURED,
    SIMULATED,
    STAGES,
    WARMUP_STEPS,
    Effort,
    Measured,
    Simulated,
)
from .poplar_plans import Planned, plans
from .poplar_results import PYTORCH, FirstStep, MeasuredResult, Result, Run, SimulatedResult, Variant
from .training import loss_error, single_device_losses

WORKER = (sys.executable, "-m", "benchmarks.poplar_worker")
MIXMESH = (sys.executable, "-m", "mixmesh")
DEMO_PROFILE_S = "20"
Progress = Callable[[str], None]
Case = Measured | Simulated | str
CASES: tuple[Case, ...] = (*MEASURED, FIRST_STEP, *SIMULATED)
QUICK: tuple[Case, ...] = (MEASURED[1], SIMULATED[2])


def cases(names: Sequence[str], among: Sequence[Case] = CASES) -> tuple[Case, ...]:
    """The cases of these names: ``a``, ``first-step``, ``llama-0.5b@poplar-b``, or a workload or a preset;
    without names, all of them."""
    return named(names, among, CASES, lambda c: (str(c), *str(c).split("@")))


def run(
    chosen: Sequence[Case],
    effort: Effort = FULL,
    progress: Progress = lambda _: None,
    keep: Path | None = None,
) -> Iterator[Result]:
    """Yields the result of each case as soon as it is there. Profiles and plans stay in ``keep``."""

    def found(case: Case, folder: Path) -> Result:
        def say(text: str) -> None:
            progress(f"{case}: {text}")

        if isinstance(case, Measured):
            return measure(case, effort, folder, say)
        return simulate(case, say) if isinstance(case, Simulated) else first_step(folder, say)

    return each_case(chosen, keep, found)


def measure(case: Measured, effort: Effort, folder: Path, say: Progress) -> MeasuredResult:
    cluster = case.cluster
    cluster_path, profile_path = folder / "cluster.toml", folder / "profile.json"
    cluster_path.write_text(case.cluster_text)
    say("profiling")
    words = (case.job, str(cluster_path), str(profile_path), str(effort.profile_s), "micro-batches")
    call(WORKER, cluster, "profile", *words)
    say("planning")
    made = jobs.make(case.job)
    graph = trace(made.model, made.batch).graph
    profile = Profile.load(profile_path)
    planned = plans(graph, cluster, profile, effort.stages, ADAM, at_once=True)
    planned += [Planned(Variant(name), None) for name in PYTORCH]
    say("the losses of a single device")
    reference = single_device_losses(jobs.make(case.job), effort.all_steps)
    ways = [(p, saved(p, folder)) for p in planned]

    def turns(chosen: list[tuple[Planned, str]]) -> tuple[list[list[dict]], str]:
        rows = [(str(p.variant), case.job, effort.all_steps, what) for p, what in chosen]
        return run_turns(cluster, rows, folder, say)

    first, emulation = turns(ways)
    outcomes = {str(p.variant): [by_rank] for (p, _), by_rank in zip(ways, first)}
    left = [w for w, by_rank in zip(ways, first) if not any(o["out_of_memory"] for o in by_rank)]
    again = left * (effort.rounds - 1)
    for (p, _), by_rank in zip(again, turns(again)[0] if again else ()):
        outcomes[str(p.variant)].append(by_rank)
    runs = tuple(result_of(p.variant, outcomes[str(p.variant)], reference) for p in planned)
    return MeasuredResult(case, runs, tuple(d.memory_bytes for d in cluster.devices), emulation)


def saved(planned: Planned, folder: Path) -> str:
    """The worker's argument for what to run: the path of a plan, or the name of a PyTorch baseline."""
    if planned.plan is None:
        return planned.variant.name
    path = folder / f"{str(planned.variant).replace(', ', '-').replace(' ', '-')}.plan"
    planned.plan.save(path)
    return str(path)


def run_turns(
    cluster: Cluster, rows: list[tuple], folder: Path, say: Progress
) -> tuple[list[list[dict]], str]:
    """Per row the outcomes of all ranks, and how the cluster was emulated."""
    runs_path = folder / "runs.json"
    runs_path.write_text(json.dumps(rows))
    _, emulation = call(WORKER, cluster, "runs", str(runs_path), str(folder), say=say)
    files = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(cluster.world_size)]
    return [list(by_rank) for by_rank in zip(*files, strict=True)], emulation


def result_of(variant: Variant, rounds: list[list[dict]], reference: Sequence[float]) -> Run:
    """Raises MixmeshError if a rank failed for another reason than memory."""
    empty = sorted({rank for outcomes in rounds for rank, o in enumerate(outcomes) if o["out_of_memory"]})
    if empty:
        return Run(variant, (), (), tuple(empty), None)
    for outcomes in rounds:
        for rank, o in enumerate(outcomes):
            if o["error"]:
                raise MixmeshError(f"{variant}: rank {rank} failed", got=o["error"][:500])
    values = [[o["value"] for o in outcomes if o["value"] is not None] for outcomes in rounds]
    return Run(
        variant,
        tuple(statistics.median(by_rank[0]["step_s"][WARMUP_STEPS:]) for by_rank in values),
        tuple(max(peaks) for peaks in zip(*([v["peak_bytes"] for v in by_rank] for by_rank in values))),
        (),
        max(loss_error(by_rank[0]["losses"], reference) for by_rank in values),
    )


def simulate(case: Simulated, say: Progress) -> SimulatedResult:
    say("tracing")
    job = make(f"{case.workload}:{GLOBAL_BATCH}")
    graph = trace(job.model, job.batch).graph
    say("planning")
    started = time.perf_counter()
    found = plans(graph, Cluster.load(case.preset), None, STAGES, ADAM)
    return SimulatedResult(case, tuple(p.variant for p in found), time.perf_counter() - started)


def first_step(folder: Path, say: Progress) -> FirstStep:
    """The commands that a user would type, for the demo's job."""
    job = Path(__file__).with_name("demo") / "job.py"
    cluster, profile, plan = (folder / name for name in ("cluster.toml", "profile.json", "first.plan"))
    cluster.write_text(DEMO_CLUSTER)
    inside = (*MIXMESH, "testbed", "--cluster", cluster, "--", *MIXMESH)
    say("profiling")
    profile_s, _ = timed(*inside, "profile", job, "--out", profile, "--budget", DEMO_PROFILE_S)
    say("planning")
    plan_s, _ = timed(*MIXMESH, "plan", job, "--cluster", cluster, "--profile", profile, "--out", plan)
    say("running")
    run_s, printed = timed(*inside, "run", job, "--plan", plan, "--steps", "1", "--json")
    return FirstStep(profile_s, plan_s, run_s, json.loads(printed.splitlines()[-1])["emulation"])


def timed(*words: object) -> tuple[float, str]:
    """(seconds of a command, its output). Raises MixmeshError if it fails."""
    started = time.perf_counter()
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise MixmeshError(f"{words[3]} failed", got=done.stderr.strip()[-500:])
    return time.perf_counter() - started, done.stdout
