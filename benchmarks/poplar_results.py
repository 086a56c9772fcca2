"""The results of ``benchmarks poplar``, and which of its targets they meet. Seconds are per step, bytes
per rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mixmesh.lang.plan_file import MicroBatch

from .poplar_cases import AS_FAST, FIRST_STEP, FIRST_STEP_S, MEMORY_TOLERANCE, Measured, Simulated
from .training_results import LOSS_TOLERANCE

OURS, EQUAL, PROPORTIONAL, HALF = "poplar", "equal", "proportional", "fast half"
AT_ONCE = "at once"  # each device's samples in one micro-batch, where that is predicted not to fit
PYTORCH = ("ddp", "fsdp")


@dataclass(frozen=True)
class Variant:
    """One way to train. ``stage`` is the ZeRO stage, None for PyTorch's own; ``micro_batches`` are (samples,
    steps, samples of the last step) of every rank. Predictions belong to the plan, if there is one."""

    name: str
    stage: int | None = None
    setting: str = ""
    micro_batches: tuple[MicroBatch, ...] = ()
    predicted_s: float | None = None
    predicted_bytes: tuple[int, ...] = ()
    fits: bool = True  # in prediction, with the planner's headroom

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"stage {self.stage}"
        return ", ".join(part for part in (self.name, stage, self.setting) if part)


@dataclass(frozen=True)
class Run:
    """The measurements of a variant: the median step of each round, or the ranks that ran ``out_of_memory``.
    ``peak_bytes`` is the most that a rank held in any round."""

    variant: Variant
    rounds_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    out_of_memory: tuple[int, ...]
    loss_error: float | None

    @property
    def ran(self) -> bool:
        return not self.out_of_memory

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def memory_errors(self) -> tuple[float, ...]:
        """Predicted above measured, as a fraction of measured."""
        return tuple(p / m - 1 for p, m in zip(self.variant.predicted_bytes, self.peak_bytes))

    def row(self) -> dict:
        return {
            "variant": str(self.variant),
            **asdict(self.variant),
            "result": "ran" if self.ran else "out of memory",
            "ranks_out_of_memory": self.out_of_memory,
            "step_s": self.median_s if self.ran else None,
            "spread_s": (min(self.rounds_s), max(self.rounds_s)) if self.ran else None,
            "rounds_s": self.rounds_s,
            "measured_bytes": self.peak_bytes,
            "memory_errors": self.memory_errors,
            "loss_error": self.loss_error,
        }


@dataclass(frozen=True)
class MeasuredResult:
    case: Measured
    runs: tuple[Run, ...]
    limit_bytes: tuple[int, ...]
    emulation: str

    def of(self, *names: str) -> tuple[Run, ...]:
        """The runs of these names that did not run out of memory."""
        return tuple(r for r in self.runs if r.variant.name in names and r.ran)

    def best(self, *names: str) -> Run | None:
        return min(self.of(*names), key=lambda r: r.median_s, default=None)

    def speedup(self, *names: str) -> float | None:
        """The speed-up of our best stage over the best of these; None if none of them runs."""
        ours, other = self.best(OURS), self.best(*names)
        return other.median_s / ours.median_s if ours and other else None

    @property
    def targets(self) -> dict[str, bool]:
        ours = [r for r in self.runs if r.variant.name == OURS]
        at_once = [
            r
            for r in self.runs
            if (r.variant.name, r.variant.setting) == (EQUAL, AT_ONCE) or r.variant.name in PYTORCH
        ]
        over_equal, over_half = self.speedup(EQUAL), self.speedup(HALF)
        found = {
            "every stage runs": bool(ours) and all(r.ran for r in ours),
            "never slower than the fast half alone": over_half is None or over_half >= AS_FAST,
            f"memory within {MEMORY_TOLERANCE:.0%} of prediction": all(
                abs(e) <= MEMORY_TOLERANCE for r in ours for e in r.memory_errors
            ),
            "never above a device's limit": all(
                peak <= limit for r in ours for peak, limit in zip(r.peak_bytes, self.limit_bytes)
            ),
            "losses": all(r.loss_error <= LOSS_TOLERANCE for r in self.runs if r.loss_error is not None),
        }
        fast_enough = over_equal is None or over_equal >= self.case.target
        found[f"{self.case.target:g}x equal micro-batches"] = fast_enough
        if self.case.overflows:
            found["equal parts at once run out of memory"] = bool(at_once) and all(not r.ran for r in at_once)
        return found

    def row(self) -> dict:
        others = (*PYTORCH, EQUAL, PROPORTIONAL, HALF)
        return {
            "case": str(self.case),
            "kind": "measured",
            "job": self.case.job,
            "limit_bytes": self.limit_bytes,
            "emulation": self.emulation,
            "speedup": {name: self.speedup(name) for name in others},
            "targets": self.targets,
            "runs": [r.row() for r in self.runs],
        }


@dataclass(frozen=True)
class SimulatedResult:
    """Simulated steps of the variants that fit in memory, with the planner's headroom."""

    case: Simulated
    variants: tuple[Variant, ...]
    planning_s: float

    def speedup(self, name: str, stage: int | None = None) -> float | None:
        """Ours over the named one: of one stage, or of the best of all."""
        ours, other = self._best(OURS, stage), self._best(name, stage)
        return other / ours if ours and other else None

    def _best(self, name: str, stage: int | None) -> float | None:
        return min(
            (
                v.predicted_s
                for v in self.variants
                if v.name == name and v.fits and stage in (None, v.stage) and v.predicted_s is not None
            ),
            default=None,
        )

    @property
    def targets(self) -> dict[str, bool]:
        found = (self.speedup(name) for name in (EQUAL, PROPORTIONAL, HALF))
        return {"never slower than another": all(s is None or s >= 1 - 1e-9 for s in found)}

    def row(self) -> dict:
        return {
            "case": str(self.case),
            "kind": "simulated",
            "planning_s": self.planning_s,
            "speedup": {name: self.speedup(name) for name in (EQUAL, PROPORTIONAL, HALF)},
            "targets": self.targets,
            "variants": [{"variant": str(v), **asdict(v)} for v in self.variants],
        }


@dataclass(frozen=True)
class FirstStep:
    """The time from the first command to the end of the first training step: profile, plan, run."""

    profile_s: float
    plan_s: float
    run_s: float
    emulation: str

    def __str__(self) -> str:
        return FIRST_STEP

    @property
    def total_s(self) -> float:
        return self.profile_s + self.plan_s + self.run_s

    @property
    def targets(self) -> dict[str, bool]:
        return {f"first step within {FIRST_STEP_S:g} s": self.total_s <= FIRST_STEP_S}

    def row(self) -> dict:
        return {
            "case": str(self),
            "kind": "first step",
            **asdict(self),
            "total_s": self.total_s,
            "targets": self.targets,
        }


Result = MeasuredResult | SimulatedResult | FirstStep


def report(results: Sequence[Result], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    targets = [met for r in results for met in r.targets.values()]
    measured = [r for r in results if isinstance(r, MeasuredResult)]
    return {
        "bench": "poplar",
        "command": command,
        "emulation": sorted({r.emulation for r in results if not isinstance(r, SimulatedResult)}),
        "losses_agree": all(r.targets["losses"] for r in measured),
        "targets_met": sum(targets),
        "targets": len(targets),
        "cases": [r.row() for r in results],
    }
