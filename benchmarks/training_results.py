"""The results of ``benchmarks training``, and which of its targets they meet. Seconds are per step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .revision import revision
from .training_cases import ALL, AS_FAST, Race, Sweep

OURS = "auto"
TUNED = "auto, tuned"  # the best of the plans that ``mixmesh tune`` has tried
WITHOUT = "auto, without a pass"  # the pass is the one that the case names
DATA_PARALLEL = "ddp-tuned"  # our sums, shares and devices, without a search for placements
PADDED = " padded"
EVENLY = " padded evenly"  # as many experts and samples on every device, for systems that need padding
LOSS_TOLERANCE = 1e-4  # relative, in float32


@dataclass(frozen=True)
class Timing:
    """``setting`` of a baseline; seconds of a step on the slowest rank, in each round."""

    name: str
    setting: str
    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)


@dataclass(frozen=True)
class Speedup:
    """Taken within each round, so that what slows the machine for a while slows both."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, ours: Timing, other: Timing) -> Speedup:
        each = [b / a for a, b in zip(ours.rounds_s, other.rounds_s)]
        return cls(statistics.median(each), min(each), max(each))


@dataclass(frozen=True)
class Measured:
    """The measurements of all variants of a case. ``loss_errors`` are relative to the single device, over
    ``checked_steps``; speeds are samples per second of each rank's forward and backward pass,
    ``proportional`` the batches in proportion to them."""

    step_s: dict[str, tuple[float, ...]]
    loss_errors: dict[str, float]
    checked_steps: int
    samples_per_s: tuple[float, ...]
    proportional: tuple[int, ...]
    emulation: str

    def timing(self, variant: str) -> Timing:
        name, _, setting = variant.partition(", ")
        return Timing(name, setting, self.step_s[variant])

    @property
    def losses_agree(self) -> bool:
        return max(self.loss_errors.values()) <= LOSS_TOLERANCE

    @property
    def ideal_s(self) -> float:
        """The speed of all devices together, without communication and optimizer."""
        return sum(self.proportional) / sum(self.samples_per_s)


@dataclass(frozen=True)
class Tried:
    """A plan in ``mixmesh tune``: seconds of a step, predicted and in every turn that it had."""

    plan: str
    predicted_s: float
    turns_s: tuple[float, ...]


@dataclass(frozen=True)
class RaceResult:
    """``ours`` is the plan that was the fastest of those ``tried``, ``untuned`` that by prediction alone."""

    case: Race
    ours: Timing
    untuned: Timing
    baselines: tuple[Timing, ...]  # every setting
    planner: str
    predicted_s: float
    planning_s: float
    shares: tuple[float, ...]
    tried: tuple[Tried, ...]
    measured: Measured
    data_parallel: Timing
    without: Timing | None = None  # the plan for a graph made without one of the passes

    @property
    def better(self) -> tuple[Timing, ...]:
        """Each baseline with the better of its settings."""
        names = dict.fromkeys(t.name for t in self.baselines)
        return tuple(min((t for t in self.baselines if t.name == n), key=lambda t: t.median_s) for n in names)

    @property
    def best(self) -> Timing:
        """The fastest baseline, a part of the cluster alone included."""
        return min(self.better, key=lambda t: t.median_s)

    @property
    def asked(self) -> Timing:
        """The fastest of the baselines that the target is over."""
        return min((t for t in self.better if t.name in self.case.against), key=lambda t: t.median_s)

    @property
    def speedup(self) -> Speedup:
        return Speedup.of(self.ours, self.best)

    @property
    def speedup_over_without(self) -> Speedup | None:
        return Speedup.of(self.ours, self.without) if self.without else None

    @property
    def targets(self) -> dict[str, bool]:
        over = (
            "the best baseline" if self.case.against == ALL else f"the best of {', '.join(self.case.against)}"
        )
        fast_enough = Speedup.of(self.ours, self.asked).median >= self.case.target
        made = {f"{self.case.target:g}x {over}": fast_enough}
        gain = self.speedup_over_without
        if gain is not None:
            made[f"{self.case.target:g}x without {self.case.without}"] = gain.median >= self.case.target
        return made | {"losses": self.measured.losses_agree}

    def row(self) -> dict:
        gain = self.speedup_over_without
        return {
            "case": str(self.case),
            "job": self.case.job,
            "cluster": self.case.cluster,
            "speedup": asdict(self.speedup),
            "speedup_untuned": asdict(Speedup.of(self.untuned, self.best)),
            "best": self.best.name,
            "asked": self.asked.name,
            "speedup_asked": asdict(Speedup.of(self.ours, self.asked)),
            "speedup_data_parallel": asdict(Speedup.of(self.ours, self.data_parallel)),
            "data_parallel_step_s": self.data_parallel.median_s,
            "target": self.case.target,
            "targets": self.targets,
            "planner": self.planner,
            "step_s": self.ours.median_s,
            "untuned_step_s": self.untuned.median_s,
            "tried": [asdict(t) for t in self.tried],
            "predicted_s": self.predicted_s,
            "planning_s": self.planning_s,
            "without": gain
            and {"pass": self.case.without, "step_s": self.without.median_s, "speedup": asdict(gain)},
            "ideal_s": self.measured.ideal_s,
            "shares": self.shares,
            "baselines": {
                t.name: {
                    "setting": t.setting,
                    "step_s": t.median_s,
                    "speedup": asdict(Speedup.of(self.ours, t)),
                    "settings": {o.setting: o.median_s for o in self.baselines if o.name == t.name},
                }
                for t in self.better
            },
            "measured": asdict(self.measured),
        }


@dataclass(frozen=True)
class SweepResult:
    case: Sweep
    timings: tuple[Timing, ...]
    predicted_s: dict[str, float]
    measured: Measured

    @property
    def ours_s(self) -> dict[int, float]:
        return {int(t.name): t.median_s for t in self.timings if t.name.isdecimal()}

    @property
    def gains(self) -> dict[int, Speedup]:
        """Over the padded plan, where padding adds anything."""
        return self._over(PADDED)

    @property
    def gains_over_even(self) -> dict[int, Speedup]:
        """Over the padded plan with equal shares."""
        return self._over(EVENLY)

    def _over(self, kind: str) -> dict[int, Speedup]:
        by_name = {t.name: t for t in self.timings}
        return {
            int(name): Speedup.of(timing, by_name[name + kind])
            for name, timing in by_name.items()
            if name + kind in by_name
        }

    @property
    def largest_bump(self) -> float:
        """The relative distance of a time above the mean of its neighbours; 0 with fewer than three."""
        return bump(list(self.ours_s.values()))

    @property
    def targets(self) -> dict[str, bool]:
        each = [g.median for g in self.gains.values()]
        best = max(g.median for g in self.gains_over_even.values())
        return {
            f"no bump above {self.case.bump:.0%}": self.largest_bump <= self.case.bump,
            "never slower than padded": min(each) >= AS_FAST,
            f"{self.case.gain:g}x the padded plan at best": max(each) >= self.case.gain,
            f"{self.case.gain:g}x the padded plan with equal shares at best": best >= self.case.gain,
            "losses": self.measured.losses_agree,
        }

    def row(self) -> dict:
        return {
            "case": str(self.case),
            "job": self.case.job,
            "cluster": self.case.cluster,
            "step_s": self.ours_s,
            "speedup": {count: asdict(gain) for count, gain in self.gains.items()},
            "speedup_over_even": {count: asdict(gain) for count, gain in self.gains_over_even.items()},
            "largest_bump": self.largest_bump,
            "targets": self.targets,
            "predicted_s": self.predicted_s,
            "measured": asdict(self.measured),
        }


Result = RaceResult | SweepResult


def loss_error(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest difference, relative to the reference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference))


def bump(times_s: Sequence[float]) -> float:
    above = [b / ((a + c) / 2) - 1 for a, b, c in zip(times_s, times_s[1:], times_s[2:])]
    return max(0.0, *above) if above else 0.0


def report(results: Sequence[Result], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    targets = [met for r in results for met in r.targets.values()]
    return {
        "bench": "training",
        "revision": revision(),
        "command": command,
        "emulation": sorted({r.measured.emulation for r in results}),
        "losses_agree": all(r.measured.losses_agree for r in results),
        "targets_met": sum(targets),
        "targets": len(targets),
        "cases": [r.row() for r in results],
    }
