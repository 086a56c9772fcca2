"""Devices that change their speed during a run, in the testbed: how soon throughput is near the best for the
changed cluster.

A job trains on a cluster, and in the middle of the run its first device gets half or twice its share of a
core. The optimum is a fresh profile and plan for the changed cluster, which trains there from its start. A
round has four runs: on each cluster unchanged, and from each to the other.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Profile
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.testbed import Testbed, probe
from mixmesh.planner import make_plan
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.search.ratios import optimal_ratio, with_ratio
from mixmesh.simulator import simulate

from . import jobs
from .measure import TIMEOUT_S, call, cluster_text, each_case, named

WORKER = (sys.executable, "-m", "benchmarks.drift_worker")
FAST, SLOW = "0.70", "0.35"
OTHERS = ("0.35", "0.35")
CHANGED_RANK, POLL_S = 0, 0.01
NEAR = 0.9  # share of the optimum's throughput
WITHIN_STEPS, WITHIN_S = 30, 120.0  # whichever is longer
LOOKED_AT, WARMUP = 5, 5  # number of consecutive steps whose median counts; first steps that do not count
LASTING = 0.9  # share of the rest of the run that must be near the optimum too
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """A job whose parameters are whole on every device, or in shards (``is_cut``)."""

    name: str
    job: str
    is_cut: bool = False

    def __str__(self) -> str:
        return self.name


CASES = (Case("gpt", "gpt"), Case("bert-cut", "bert", is_cut=True))


@dataclass(frozen=True)
class Effort:
    """The number of steps before and after the change, and how often all this is repeated. Unchanged runs
    have as many steps: the medians of 30 steps at the start of a run were up to 12 % apart."""

    rounds: int
    before: int = 25
    after: int = 75
    profile_s: float = 12.0

    @property
    def unchanged(self) -> int:
        return self.before + self.after


FULL, SHORT = Effort(rounds=3), Effort(rounds=1)


@dataclass(frozen=True)
class Recovery:
    """One change: seconds of a step before it, between it and the change of shares, at the end of the run,
    and at the optimum; steps and seconds from the change until throughput was near the optimum (None: it
    never was), and the delay by each change of shares."""

    before_s: float
    unbalanced_s: float
    balanced_s: float
    optimum_s: float
    steps: int | None
    time_s: float | None
    pauses_s: tuple[float, ...]
    decisions: tuple[str, ...]

    @property
    def is_in_time(self) -> bool:
        """Whether that met the target, in steps or in seconds."""
        return self.steps is not None and (self.steps <= WITHIN_STEPS or self.time_s <= WITHIN_S)


@dataclass(frozen=True)
class Result:
    """The recoveries of ``case`` by change, one per round."""

    case: str
    recoveries: dict[str, tuple[Recovery, ...]]
    emulation: str = "quota"

    @property
    def targets(self) -> dict[str, bool]:
        text = f"within {1 - NEAR:.0%} of the optimum in {WITHIN_STEPS} steps or {WITHIN_S:.0f} s"
        return {f"{change}: {text}": all(r.is_in_time for r in of) for change, of in self.recoveries.items()}

    def row(self) -> dict:
        return {
            "case": self.case,
            "recoveries": {change: [asdict(r) for r in of] for change, of in self.recoveries.items()},
            "targets": self.targets,
        }


def cases(names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of these names; without names, all of them."""
    return named(names, CASES, CASES, lambda case: (case.name,))


def run(
    chosen: Sequence[Case],
    effort: Effort = FULL,
    progress: Progress = lambda _: None,
    keep: Path | None = None,
) -> Iterator[Result]:
    """Yields the result of each case as soon as it is measured. Raises TestbedUnavailable if device speeds
    cannot be set."""
    return each_case(
        chosen, keep, lambda case, folder: measure(case, effort, folder, lambda x: progress(f"{case}: {x}"))
    )


@dataclass(frozen=True)
class Ground:
    """A cluster with the profile and the plan for it, in files of ``folder``."""

    name: str
    cluster: Cluster
    folder: Path

    def file(self, kind: str) -> str:
        return str(self.folder / f"{self.name}.{kind}")


def measure(case: Case, effort: Effort, folder: Path, say: Progress) -> Result:
    """Profiles and plans a case for both clusters, and makes all of its runs."""
    grounds = {}
    for name, share in (("fast", FAST), ("slow", SLOW)):
        text = cluster_text("1", (share,), OTHERS)
        ground = grounds[name] = Ground(name, Cluster.parse(text, where="bench drift"), folder.absolute())
        Path(ground.file("toml")).write_text(text)
        say(f"profiling, {name}")
        words = ("profile", case.job, ground.file("toml"), ground.file("json"), str(effort.profile_s))
        call(WORKER, ground.cluster, *words)
        planned(case, ground).save(ground.file("plan"))
    found: dict[str, list[Recovery]] = {"halved": [], "doubled": []}
    for number in range(effort.rounds):
        unchanged = {}
        for name, ground in grounds.items():
            say(f"round {number + 1}, unchanged, {name}")
            steps, _ = train(case, ground, effort.unchanged, None)
            unchanged[name] = statistics.median(durations(steps)[WARMUP:])
        for change, start, end in (("halved", "fast", "slow"), ("doubled", "slow", "fast")):
            say(f"round {number + 1}, {change}")
            to = (effort.before, float(SLOW if end == "slow" else FAST))
            steps, figures = train(case, grounds[start], effort.before + effort.after, to)
            found[change].append(recovery(steps, figures, effort.before, unchanged[end]))
    return Result(case.name, {change: tuple(of) for change, of in found.items()})


def planned(case: Case, ground: Ground) -> Plan:
    """The best plan of data parallelism; with parameters in shards, if the case has them cut."""
    made = jobs.make(case.job)
    traced, profile = trace(made.model, made.batch), Profile.load(ground.file("json"))
    plan = make_plan(traced, ground.cluster, profile=profile, planner="ddp-tuned")
    if not case.is_cut:
        return plan
    costs = CostModel(ground.cluster, profile)
    program = fully_sharded(data_parallel(traced.graph, costs, plan.program.ratio_of["r0"]))
    program = with_ratio(program, "r0", optimal_ratio(program, costs, tuple(range(program.world_size))))
    timeline = simulate(program, costs, usable_bytes=plan.usable_bytes)
    return replace(
        plan,
        program=program,
        planner="fsdp-tuned",
        predicted_step_s=timeline.step_s,
        predicted_peak_memory_bytes=timeline.peak_memory_bytes,
    )


Step = tuple[int, float]  # (its number, when it was over), in seconds of one clock


def train(
    case: Case, ground: Ground, num_steps: int, change: tuple[int, float] | None
) -> tuple[list[Step], dict]:
    """The steps of a run, and what its balancer did; after the step given in ``change`` the first device has
    another share of a core. Raises DeviceLost for a rank that fails."""
    lines: list[dict] = []
    errors: list[str] = []

    def on_output(rank: int, stream: str, text: str) -> None:
        if rank == 0 and stream == "stdout":
            lines.extend(json.loads(line) for line in text.splitlines() if line.startswith("{"))
        elif stream == "stderr":
            errors.append(f"[rank {rank}] {text}")

    words = [ground.file(kind) for kind in ("plan", "toml", "json")]
    with Testbed(ground.cluster, on_output=on_output) as bed:
        bed.spawn([*WORKER, "train", case.job, *words, str(num_steps), str(int(change is not None))])
        while change is not None and bed.poll(POLL_S):
            if any(line.get("step") == change[0] for line in lines[-3:]):
                bed.set_share(CHANGED_RANK, change[1])
                change = None
        result = bed.wait(timeout_s=TIMEOUT_S, check=False)
    if result.lost is not None:
        sys.stderr.write("".join(errors[-40:]))
        result.check()
    return [(line["step"], line["at_s"]) for line in lines if "step" in line], lines[-1]


def durations(steps: Sequence[Step]) -> list[float]:
    """Seconds from each step to the next."""
    return [after - before for (_, before), (_, after) in zip(steps, steps[1:])]


def recovery(steps: Sequence[Step], figures: dict, changed_at: int, optimum_s: float) -> Recovery:
    """The recovery from a change after step ``changed_at``, if the optimum is ``optimum_s`` a step."""
    taken_s = durations(steps)  # step n + 1 has number n - 1
    before, after = taken_s[WARMUP : changed_at - 1], taken_s[changed_at:]
    told = figures["rebalancing"]
    first = next((c["step"] for c in told["changes"] if c["step"] > changed_at), None)
    until = len(after) if first is None else max(first - changed_at, 1)
    smooth = [statistics.median(after[n : n + LOOKED_AT]) for n in range(len(after) - LOOKED_AT + 1)]
    is_near = [step_s <= optimum_s / NEAR for step_s in smooth]
    near = next((n for n, found in enumerate(is_near) if found and lasts(is_near[n:])), None)
    return Recovery(
        statistics.median(before),
        statistics.median(after[:until]),
        statistics.median(after[-len(after) // 3 :]),
        optimum_s,
        near,
        None if near is None else sum(after[:near]),
        tuple(c["pause_s"] for c in told["changes"]),
        tuple(figures["said"]),
    )


def lasts(is_near: Sequence[bool]) -> bool:
    """Whether the throughput is near most of the time."""
    return sum(is_near) >= LASTING * len(is_near)


def check_testbed() -> None:
    """Raises TestbedUnavailable where shares of cores cannot be set."""
    probe().require()
