"""Predicted against measured, in the testbed: time and peak memory of several plans per job and cluster.

For every setting: profile the job on the emulated cluster, plan it by every planner, time the plans in turn
on the emulated cluster, and run each once more in plain processes to measure its memory.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.errors import Infeasible, InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.planner import make_plan

from . import jobs
from .accuracy_cases import CLUSTERS, PLANNERS, SETTINGS, Setting, cluster_of
from .measure import call, case_folder

PROFILE_BUDGET_S = 25.0
MEMORY_STEPS = "4"
WORKER = (sys.executable, "-m", "benchmarks.accuracy_worker")
MIXMESH = (sys.executable, "-m", "mixmesh")


@dataclass(frozen=True)
class Case:
    """One plan of one job on one cluster. ``planners`` are all planners that found this plan; ``chosen``
    tells whether ``auto`` chose it. Bytes are per rank."""

    job: str
    cluster: str
    planners: tuple[str, ...]
    chosen: bool
    predicted_s: float
    measured_s: float
    spread_s: tuple[float, float]  # the least and the most among the rounds
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    emulation: str
    drift: float = 1.0  # seconds of a local step while the plans ran, relative to those during the profile

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def time_error_without_drift(self) -> float:
        """The error of the prediction if the machine has become slower since the profile by as much as a
        local step has."""
        return self.predicted_s * self.drift / self.measured_s - 1

    @property
    def memory_errors(self) -> tuple[float, ...]:
        return tuple(p / m - 1 for p, m in zip(self.predicted_bytes, self.measured_bytes))


def settings(names: Sequence[str]) -> tuple[Setting, ...]:
    """The settings of these names (``gpt@pair``), of a job or of a cluster; without names, all of them.

    A pair of a known job and a known cluster that is not yet a setting becomes one.
    """
    if not names:
        return SETTINGS
    out: list[Setting] = []
    known = sorted({s.job for s in SETTINGS})
    for name in names:
        job, _, cluster = name.partition("@")
        found = [s for s in SETTINGS if name in (str(s), s.job, s.cluster)]
        if not found and job in known and cluster in CLUSTERS:
            found = [Setting(job, cluster)]
        if not found:
            raise InputError(
                f"no such case: {name!r}",
                expected=f"a job ({', '.join(known)}), a cluster ({', '.join(CLUSTERS)}), or JOB@CLUSTER",
                got=name,
                hint=f"--only {SETTINGS[0]}",
            )
        out += found
    return tuple(dict.fromkeys(out))


def run(
    chosen: Sequence[Setting],
    planners: Sequence[str] = PLANNERS,
    progress: Callable[[str], None] = lambda _: None,
    keep: Path | None = None,
) -> Iterator[tuple[Setting, tuple[Case, ...]]]:
    """Yields the cases of each setting as soon as they are measured. Profiles and plans stay in ``keep``."""
    for setting in chosen:
        with case_folder(keep, str(setting)) as folder:
            yield setting, measure(setting, planners, folder, progress)


def measure(
    setting: Setting, planners: Sequence[str], folder: Path, progress: Callable[[str], None]
) -> tuple[Case, ...]:
    cluster = cluster_of(setting)
    cluster_path, profile_path = folder / "cluster.toml", folder / "profile.json"
    cluster_path.write_text(CLUSTERS[setting.cluster])
    progress(f"{setting}: profiling")
    words = (setting.job, str(cluster_path))
    profiled, _ = call(WORKER, cluster, "profile", *words, str(profile_path), str(PROFILE_BUDGET_S))
    progress(f"{setting}: planning")
    plans = distinct_plans(setting, cluster, planners, Profile.load(profile_path))
    paths = {}
    for names, plan in plans.items():
        paths["+".join(names)] = str(folder / f"{names[0]}.plan")
        plan.save(paths["+".join(names)])
    progress(f"{setting}: timing {len(plans)} plans in turn")
    printed, emulation = call(WORKER, cluster, "times", *words, json.dumps(paths))
    timed = json.loads(printed)
    step_s, slower = timed["step_s"], drift(json.loads(profiled), timed["local_s"])
    cases = []
    for names, plan in plans.items():
        key = "+".join(names)
        progress(f"{setting}: memory of {key}")
        run_it = (
            "run",
            f"{jobs.__file__}:{setting.job}",
            "--plan",
            paths[key],
            "--steps",
            MEMORY_STEPS,
            "--json",
        )
        printed, _ = call(MIXMESH, cluster, *run_it, plain=True)
        cases.append(
            Case(
                setting.job,
                setting.cluster,
                names,
                "auto" in names,
                plan.predicted_step_s,
                statistics.median(step_s[key]),
                (min(step_s[key]), max(step_s[key])),
                plan.predicted_peak_memory_bytes,
                tuple(json.loads(printed)["peak_memory_bytes"]),
                emulation,
                slower,
            )
        )
    return tuple(cases)


def distinct_plans(
    setting: Setting, cluster: Cluster, planners: Sequence[str], profile: Profile
) -> dict[tuple[str, ...], Plan]:
    """Plans by the planners that found them."""
    made = jobs.make(setting.job)
    traced = trace(made.model, made.batch)
    found: dict[str, tuple[list[str], Plan]] = {}
    for planner in planners:
        try:
            plan = make_plan(traced, cluster, planner=planner, profile=profile)
        except Infeasible:
            continue
        found.setdefault(str(plan.program), ([], plan))[0].append(planner)
    return {tuple(names): plan for names, plan in found.values()}


def drift(before_s: Sequence[float], rounds_s: Sequence[Sequence[float]]) -> float:
    """The factor by which a local step has become slower: the mean over the rounds and the ranks."""
    now_s = [statistics.fmean(of_rank) for of_rank in zip(*rounds_s)]
    return statistics.fmean(now / before for now, before in zip(now_s, before_s))


def regrets(cases: Sequence[Case]) -> dict[str, float]:
    """For each setting, how much slower the plan that ``auto`` chose is than the fastest one measured."""
    out = {}
    for key, group in groupby(cases, lambda c: f"{c.job}@{c.cluster}"):
        them = list(group)
        taken = [c.measured_s for c in them if c.chosen]
        if taken:
            out[key] = taken[0] / min(c.measured_s for c in them) - 1
    return out


def summarise(cases: Sequence[Case]) -> dict[str, float | int]:
    """Fractions; correlations over all cases."""
    predicted, measured = [c.predicted_s for c in cases], [c.measured_s for c in cases]
    memory = [e for c in cases for e in c.memory_errors]
    regret = list(regrets(cases).values())
    several = len(cases) > 1
    return {
        "cases": len(cases),
        "time_mape": statistics.fmean(abs(c.time_error) for c in cases),
        "time_mape_without_drift": statistics.fmean(abs(c.time_error_without_drift) for c in cases),
        "pearson": statistics.correlation(predicted, measured) if several else 1.0,
        "spearman": statistics.correlation(ranks(predicted), ranks(measured)) if several else 1.0,
        "memory_max_under": max(0.0, -min(memory)),
        "memory_max_over": max(0.0, max(memory)),
        "mean_regret": statistics.fmean(regret) if regret else 0.0,
        "max_regret": max(regret, default=0.0),
    }


def ranks(values: Sequence[float]) -> list[int]:
    """The rank of each value among all; equal values share the first of their ranks."""
    ordered = sorted(values)
    return [ordered.index(v) for v in values]


def report(cases: Sequence[Case], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    rows = [
        {
            **asdict(c),
            "time_error": c.time_error,
            "time_error_without_drift": c.time_error_without_drift,
            "memory_errors": list(c.memory_errors),
        }
        for c in cases
    ]
    return {
        "bench": "accuracy",
        "command": command,
        **summarise(cases),
        "regrets": regrets(cases),
        "emulation": sorted({c.emulation for c in cases}),
        "rows": rows,
    }
