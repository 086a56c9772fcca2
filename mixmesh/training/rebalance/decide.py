"""Decides whether other shares pay for the rest of a run, with a line that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...base.units import seconds_text


@dataclass(frozen=True)
class Terms:
    """The numbers behind a decision. ``factors`` are, per rank, the seconds of computing over the planned
    ones. ``step_s`` is the measured step and ``new_step_s`` the prediction under ``new_shares``; ``problem``
    says why there are no new shares, if there are none."""

    step: int
    num_steps: int
    factors: tuple[float, ...]
    shares: tuple[float, ...]
    new_shares: tuple[float, ...]
    step_s: float
    new_step_s: float
    steps_left: int
    pause_s: float
    problem: str = ""
    other_plan: str = ""  # planners of this plan and of the next, if one of another form follows


@dataclass(frozen=True)
class Decision:
    """The decision on these ``terms``; ``reason`` says why shares stay, and is empty if they change."""

    terms: Terms
    reason: str

    @property
    def is_applied(self) -> bool:
        return not self.reason

    @property
    def cause(self) -> str:
        """Names the device that is furthest from its planned seconds, relative to the others."""
        factors = self.terms.factors
        rank = max(range(len(factors)), key=lambda r: abs(_relative(factors, r) - 1))
        times = _relative(factors, rank)
        return f"compared with the others, device {rank} takes {times:.2f}x as long as planned"

    def text(self) -> str:
        """The decision in one line, with all numbers."""
        t = self.terms
        head = f"step {t.step}: {self.cause} for {t.num_steps} steps"
        if t.problem:
            return f"{head}; shares {_percent(t.shares)} % stay: {t.problem}"
        if t.other_plan:
            return (
                f"{head}; plan {t.other_plan}, step {seconds_text(t.step_s)} -> {seconds_text(t.new_step_s)} "
                f"predicted, {t.steps_left} steps left, pause {seconds_text(t.pause_s)}: "
                f"{self.reason or 'applied, going on from a checkpoint'}"
            )
        return (
            f"{head}; shares {_percent(t.shares)} -> {_percent(t.new_shares)} %, "
            f"step {seconds_text(t.step_s)} -> {seconds_text(t.new_step_s)} predicted, "
            f"{t.steps_left} steps left, pause {seconds_text(t.pause_s)}: {self.reason or 'applied'}"
        )


def decide(terms: Terms, least_gain: float) -> Decision:
    """The decision: shares change if a step becomes shorter by ``least_gain`` of itself, and the remaining
    steps together by more than the pause."""
    gain_s = terms.step_s - terms.new_step_s
    if terms.problem:
        return Decision(terms, terms.problem)
    if gain_s < least_gain * terms.step_s:
        return Decision(terms, f"not applied, gains less than {least_gain:.0%}")
    if gain_s * terms.steps_left <= terms.pause_s:
        return Decision(terms, "not applied, the steps left do not pay for the pause")
    return Decision(terms, "")


def _relative(factors: Sequence[float], rank: int) -> float:
    """The factor of a rank relative to the median of the other computing ranks."""
    others = sorted(f for r, f in enumerate(factors) if r != rank and f > 0)
    if not others or factors[rank] <= 0:
        return 1.0
    return factors[rank] / others[(len(others) - 1) // 2]


def _percent(shares: Sequence[float]) -> str:
    return "/".join(f"{100 * share:.0f}" for share in shares)
