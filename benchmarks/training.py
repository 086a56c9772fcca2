"""Our plans compared with PyTorch's data parallelism, in the testbed: every step is real.

For every case: profile its job on the emulated cluster, plan it by ``auto``, try the best plans as ``mixmesh
tune`` does, and let both plans take turns with the baselines, all in one run. All losses are compared with
the single device's.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mixmesh.cost import CostModel, Profile
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import PASSES, trace
from mixmesh.lang.ir import support
from mixmesh.lang.plan_file import Plan
from mixmesh.passes.algorithms import with_algorithms
from mixmesh.planner import make_plan
from mixmesh.runtime.job_data import endless
from mixmesh.search.placement.lower import even_over
from mixmesh.search.ratios import with_ratio
from mixmesh.simulator import simulate

from . import jobs
from .measure import call, each_case, named
from .training_cases import (
    CASES,
    CLUSTERS,
    FULL,
    Case,
    Effort,
    Race,
    Sweep,
    cluster_of,
    padded,
)
from .training_results import (
    DATA_PARALLEL,
    EVENLY,
    OURS,
    PADDED,
    TUNED,
    WITHOUT,
    Measured,
    RaceResult,
    Result,
    SweepResult,
    Tried,
    loss_error,
)

WORKER = (sys.executable, "-m", "benchmarks.training_worker")
Progress = Callable[[str], None]


def cases(names: Sequence[str], among: Sequence[Case] = CASES) -> tuple[Case, ...]:
    """The cases of these names (``vgg``, ``transformer@pair``), jobs or clusters; without names, all of
    them."""
    return named(names, among, among, lambda c: (str(c), c.name, c.job, c.cluster))


def run(
    chosen: Sequence[Case],
    effort: Effort = FULL,
    progress: Progress = lambda _: None,
    keep: Path | None = None,
) -> Iterator[Result]:
    """Yields the result of each case as soon as it is measured. Profiles and plans stay in ``keep``."""

    def measured(case: Case, folder: Path) -> Result:
        made = race if isinstance(case, Race) else sweep
        return made(case, effort, folder, lambda text: progress(f"{case}: {text}"))

    return each_case(chosen, keep, measured)


def race(case: Race, effort: Effort, folder: Path, say: Progress) -> RaceResult:
    variants = {OURS: case.job, TUNED: case.job, DATA_PARALLEL: case.job} | (
        {WITHOUT: case.job} if case.without else {}
    )
    found, plans, tried = measure(case, variants, case.job, effort, folder, say)
    plan = plans[TUNED]
    return RaceResult(
        case,
        found.timing(TUNED),
        found.timing(OURS),
        tuple(found.timing(name) for name in found.step_s if name not in variants),
        plan.planner,
        plans[OURS].predicted_step_s,
        plans[OURS].planning_s,
        plan.program.ratios[0][1],
        tried,
        found,
        found.timing(DATA_PARALLEL),
        found.timing(WITHOUT) if case.without else None,
    )


def sweep(case: Sweep, effort: Effort, folder: Path, say: Progress) -> SweepResult:
    world_size = cluster_of(case).world_size
    variants = {}
    for count in case.counts:
        variants[str(count)] = f"{case.job}:{count}"
        if padded(count, world_size) != count:
            for kind in (PADDED, EVENLY):
                variants[f"{count}{kind}"] = f"{case.job}:{count}:{padded(count, world_size)}"
    found, plans, _ = measure(case, variants, "", effort, folder, say)
    return SweepResult(
        case,
        tuple(found.timing(name) for name in variants),
        {name: plan.predicted_step_s for name, plan in plans.items()},
        found,
    )


def measure(
    case: Case,
    variants: dict[str, str],
    baselines_of: str,
    effort: Effort,
    folder: Path,
    say: Progress,
) -> tuple[Measured, dict[str, Plan], tuple[Tried, ...]]:
    """Profiles one job, plans it once per variant (tuned or divided evenly if its name says so), and times
    all plans together with the baselines of one. Also returns the plans that tuning has tried."""
    cluster = cluster_of(case)
    cluster_path = folder / "cluster.toml"
    cluster_path.write_text(CLUSTERS[case.cluster])
    profile_path = folder / "profile.json"
    say(f"profiling {case.profiled}")
    words = (case.profiled, str(cluster_path), str(profile_path), str(effort.profile_s))
    call(WORKER, cluster, "profile", *words)
    profile = Profile.load(profile_path)
    plans = {}
    saved = {}
    tried: tuple[Tried, ...] = ()
    for name, job in variants.items():
        path = folder / re.sub(r"[:, ]+", "-", f"{job}-{name}.plan")
        saved[name] = (job, str(path))
        if name == TUNED:
            say(f"tuning {job}")
            words = (job, str(cluster_path), str(profile_path), str(path))
            tried = tuple(Tried(*t) for t in json.loads(call(WORKER, cluster, "tune", *words, say=say)[0]))
            plans[name] = Plan.load(path)
            continue
        say(f"planning {job}")
        made = jobs.make(job)
        passes = [p for p in PASSES if name != WITHOUT or p.__name__ != case.without]
        planner = name if name == DATA_PARALLEL else "auto"
        plan = make_plan(
            trace(made.model, made.batch, passes=passes), cluster, planner=planner, profile=profile
        )
        plans[name] = dealt_evenly(plan, CostModel(cluster, profile)) if name.endswith(EVENLY) else plan
        plans[name].save(path)
    turns = {"rounds": effort.rounds, "turn_s": effort.turn_s, "max_steps": effort.max_steps}
    words = (json.dumps(saved), baselines_of, json.dumps(turns), str(cluster_path))
    printed, emulation = call(WORKER, cluster, "times", *words, say=say)
    found = json.loads(printed)
    say("the losses of a single device")
    job_of = {name: variants.get(name, baselines_of) for name in found["losses"]}
    reference = {
        job: single_device_losses(jobs.make(job), effort.checked_steps)
        for job in dict.fromkeys(job_of.values())
    }
    errors = {
        name: loss_error(losses[: effort.checked_steps], reference[job_of[name]])
        for name, losses in found["losses"].items()
    }
    measured = Measured(
        {name: tuple(s) for name, s in found["step_s"].items()},
        errors,
        min(effort.checked_steps, *map(len, found["losses"].values())),
        tuple(found.get("samples_per_s", ())),
        tuple(found.get("proportional", ())),
        emulation,
    )
    return measured, plans, tried


def dealt_evenly(plan: Plan, costs: CostModel) -> Plan:
    """The plan with as much of everything on each rank that takes part."""
    program = plan.program
    for name, ratio in program.ratios:
        program = with_ratio(program, name, even_over(support(ratio), program.world_size))
    predicted = simulate(program, costs, micro_batches=plan.micro_batches, usable_bytes=plan.usable_bytes)
    return replace(
        plan,
        program=with_algorithms(program, costs),
        predicted_step_s=predicted.step_s,
        predicted_peak_memory_bytes=predicted.peak_memory_bytes,
    )


def single_device_losses(made: Job, steps: int) -> list[float]:
    """The losses of a job's model, trained in this process alone."""
    optimizer = made.optimizer(made.model.parameters())
    losses = []
    for _, batch in zip(range(steps), endless(made.data, made.batch)):
        loss = made.model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
