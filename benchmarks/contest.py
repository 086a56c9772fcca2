"""Programs for one job on one emulated cluster, timed in turns in one run: the common part of ``benchmarks
order``, ``sync``, ``sfb`` and ``pipeline``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Profile
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Graph, Program
from mixmesh.lang.plan_file import Plan
from mixmesh.passes.algorithms import with_algorithms
from mixmesh.simulator import MicroBatches, simulate

from . import jobs
from .measure import call
from .revision import revision
from .training import WORKER, Progress, loss_error, single_device_losses
from .training_cases import Effort
from .training_results import LOSS_TOLERANCE, Speedup, Timing

OURS = "ours"


@dataclass(frozen=True)
class Entry:
    """A program, in the micro-batches of a plan if it has any."""

    program: Program
    micro_batches: MicroBatches = None


Programs = Callable[[Graph, CostModel], Mapping[str, Program | Entry]]


@dataclass(frozen=True)
class Contest:
    """``programs`` of ``job`` (in ``jobs.py``). The program named ``ours`` must be faster than each of
    ``targets`` by its factor. ``cluster`` is a cluster file."""

    name: str
    job: str
    cluster: str
    programs: Programs
    targets: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ContestResult:
    """Seconds of a step, predicted and measured; ``loss_error`` is the largest of all programs, relative to
    a single device."""

    contest: Contest
    predicted_s: dict[str, float]
    timings: tuple[Timing, ...]
    loss_error: float
    emulation: str

    def timing(self, name: str) -> Timing:
        return next(t for t in self.timings if t.name == name)

    @property
    def speedups(self) -> dict[str, Speedup]:
        """The speed-up of ours over each of the others."""
        ours = self.timing(OURS)
        return {t.name: Speedup.of(ours, t) for t in self.timings if t.name != OURS}

    @property
    def targets(self) -> dict[str, bool]:
        speedups = self.speedups
        met = {f"{least:g}x {name}": speedups[name].median >= least for name, least in self.contest.targets}
        return {**met, "losses": self.loss_error <= LOSS_TOLERANCE}

    def row(self) -> dict:
        return {
            "case": self.contest.name,
            "job": self.contest.job,
            "predicted_s": self.predicted_s,
            "measured_s": {t.name: t.median_s for t in self.timings},
            "rounds_s": {t.name: t.rounds_s for t in self.timings},
            "speedup": {name: s.median for name, s in self.speedups.items()} if self.contest.targets else {},
            "targets": self.targets,
            "loss_error": self.loss_error,
        }


def hold(contest: Contest, effort: Effort, folder: Path, say: Progress) -> ContestResult:
    """Profiles the job, makes its programs and has them take turns."""
    costs = profiled(contest.job, contest.cluster, effort, folder, say)
    say("planning")
    made = jobs.make(contest.job)
    programs = contest.programs(trace(made.model, made.batch).graph, costs)
    found = turns({n: (contest.job, program) for n, program in programs.items()}, costs, effort, folder, say)
    say("the losses of a single device")
    checked = min(effort.checked_steps, *map(len, found.losses.values()))
    reference = single_device_losses(jobs.make(contest.job), checked)
    worst = max(loss_error(losses[:checked], reference) for losses in found.losses.values())
    return ContestResult(contest, found.predicted_s, found.timings, worst, found.emulation)


def profiled(job: str, cluster_text: str, effort: Effort, folder: Path, say: Progress) -> CostModel:
    """The cost model of a job on a cluster, as just measured."""
    cluster = Cluster.parse(cluster_text, where=f"bench, {job}")
    profile_path, cluster_path = folder / "profile.json", folder / "cluster.toml"
    cluster_path.write_text(cluster_text)
    say(f"profiling {job}")
    call(WORKER, cluster, "profile", job, str(cluster_path), str(profile_path), str(effort.profile_s))
    return CostModel(cluster, Profile.load(profile_path))


@dataclass(frozen=True)
class Turns:
    """Seconds of a step, predicted and measured, and the losses of every step, by the name of a program."""

    predicted_s: dict[str, float]
    timings: tuple[Timing, ...]
    losses: dict[str, list[float]]
    emulation: str

    def timing(self, name: str) -> Timing:
        return next(t for t in self.timings if t.name == name)


def turns(
    programs: Mapping[str, tuple[str, Program | Entry]],
    costs: CostModel,
    effort: Effort,
    folder: Path,
    say: Progress,
) -> Turns:
    """Programs, each with its job, timed in turns on the emulated cluster."""
    predicted_s, saved = {}, {}
    for number, (name, (job, made)) in enumerate(programs.items()):
        entry = made if isinstance(made, Entry) else Entry(made)
        predicted = simulate(entry.program, costs, micro_batches=entry.micro_batches)
        predicted_s[name] = predicted.step_s
        plan = Plan(
            program=with_algorithms(entry.program, costs),
            planner="bench",
            predicted_step_s=predicted.step_s,
            predicted_peak_memory_bytes=predicted.peak_memory_bytes,
            cluster_fingerprint=costs.cluster.fingerprint,
            micro_batches=entry.micro_batches,
        )
        plan.save(folder / f"{number}.plan")
        saved[name] = (job, str(folder / f"{number}.plan"))
    how = {"rounds": effort.rounds, "turn_s": effort.turn_s, "max_steps": effort.max_steps}
    words = (json.dumps(saved), "", json.dumps(how))
    printed, emulation = call(WORKER, costs.cluster, "times", *words, say=say)
    found = json.loads(printed)
    timings = tuple(Timing(name, "", tuple(s)) for name, s in found["step_s"].items())
    return Turns(predicted_s, timings, found["losses"], emulation)


def report(bench: str, results: Sequence[ContestResult], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    targets = [met for r in results for met in r.targets.values()]
    return {
        "bench": bench,
        "revision": revision(),
        "command": command,
        "emulation": sorted({r.emulation for r in results}),
        "targets_met": sum(targets),
        "targets": len(targets),
        "cases": [r.row() for r in results],
    }
