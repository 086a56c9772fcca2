"""One rank of ``python -m benchmarks training``: profiles a job, tries its plans, or runs all in turns.

Plans and PyTorch's baselines take turns in one process, so that the comparison holds while the speed of a
shared machine drifts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial

import torch.distributed as dist

from benchmarks import jobs
from benchmarks.measure import (
    COLLECTIVE_TIMEOUT_S,
    measure_profile,
    plan_step,
    print_from_rank_0,
    slowest,
)
from benchmarks.torch_baselines import (
    BASELINES,
    ON_ONE_MACHINE,
    Step,
    batch_size,
    counts_on_one_machine,
    measured_speeds,
    parallel_step,
    single_step,
)
from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.lang.ir import even_ratio
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.testbed import enter_device, leave_device
from mixmesh.measure.tuning import kind_text, tune
from mixmesh.planner import whole_counts
from mixmesh.runtime.comm import default_device, initialise, leave

WARMUP_STEPS = 2  # connections, allocators; DDP remakes its buckets after the first step


def measure_times(plans: str, baselines_of: str, effort: str, cluster: str) -> None:
    """``plans`` maps names to a job and the path of its plan; ``baselines_of`` is a job, or empty;
    ``cluster`` is the path of the cluster file."""
    initialise(int(os.environ["WORLD_SIZE"]), default_device(), COLLECTIVE_TIMEOUT_S)
    steps: dict[str, Step] = {}
    about: dict[str, object] = {}
    if baselines_of:
        found, about = baseline_steps(baselines_of, Cluster.load(cluster))
        steps.update(found)
    for name, (job, path) in json.loads(plans).items():
        steps[name] = plan_step(job, Plan.load(path))
    enter_device()  # all process groups are there, and their threads outside
    step_s, losses = take_turns(steps, **json.loads(effort))
    print_from_rank_0({"step_s": step_s, "losses": losses, **about})


def tuned(job: str, cluster: str, profile: str, out: str) -> None:
    """The plan that is fastest when it is tried, into ``out``; what was tried goes to stdout."""
    costs = Profile.load(profile)
    found = tune(partial(jobs.make, job), Cluster.load(cluster), costs, progress=say_first)
    if dist.get_rank() == 0:
        found.plan.save(out)
    print_from_rank_0([[kind_text(t.plan), t.plan.predicted_step_s, t.turns_s] for t in found.trials])


def baseline_steps(job: str, cluster: Cluster) -> tuple[dict[str, Step], dict[str, object]]:
    """The steps of every setting of every baseline; what they rest on, for the report."""
    enter_device()
    proportional, speeds = measured_speeds(jobs.make(job))
    leave_device()
    batch = batch_size(jobs.make(job))
    even = whole_counts(even_ratio(dist.get_world_size()), batch)
    fastest = max(range(len(speeds)), key=speeds.__getitem__)
    steps = {"single, the fastest device": single_step(jobs.make(job), fastest)}
    for b in BASELINES:
        steps[str(b)] = parallel_step(jobs.make(job), b.wrap, proportional if b.proportional else even)
    machines = [cluster.ranks_of(m) for m in range(len(cluster.machines))]
    alone = counts_on_one_machine(machines, speeds, batch)
    for b in ON_ONE_MACHINE if alone else ():
        steps[str(b)] = parallel_step(jobs.make(job), b.wrap, alone)
    return steps, {"samples_per_s": speeds, "proportional": proportional}


def take_turns(
    steps: Mapping[str, Step], rounds: int, turn_s: float, max_steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per variant, the seconds of a step in each round, and the losses of all its steps. Collective."""
    losses: dict[str, list[float]] = {name: [] for name in steps}

    def run(name: str, count: int) -> float:
        dist.barrier()
        seconds, made = slowest(steps[name], count)
        losses[name] += [loss() for loss in made]
        return seconds

    count = {}
    for name in steps:
        say(f"warming up {name}")
        run(name, WARMUP_STEPS)
        count[name] = max(1, min(max_steps, round(turn_s / run(name, 1))))
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name in steps:
            if count[name] > 1:
                run(name, 1)  # warms caches that the last variant has filled
            step_s[name].append(run(name, count[name]))
    return step_s, losses


say = partial(print, file=sys.stderr, flush=True)


def say_first(text: str) -> None:
    if not dist.get_rank():
        say(text)


if __name__ == "__main__":
    {"profile": measure_profile, "tune": tuned, "times": measure_times}[sys.argv[1]](*sys.argv[2:])
    leave()
