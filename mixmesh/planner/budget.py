"""How much planning may do, as one value that is handed down.

The unit is a *visit*: one instruction of a program, or one node of a graph, in a step that is simulated. What
planning looks into takes a number of steps, so that larger programs get fewer trials. Visits are counted and
not timed, so that a plan depends on the job and the cluster and not on how fast the planning machine is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SEARCH_S = 20.0


@dataclass(frozen=True)
class Budget:
    """``visits`` that may be made for one decision, and ``search_s``: how long planners may search that have
    no end of their own (placed, heterog, tag), the only ones that ask a clock."""

    visits: float
    search_s: float = SEARCH_S

    @property
    def is_ample(self) -> bool:
        """Whether it pays for everything."""
        return self.visits == float("inf")

    @property
    def ample(self) -> Budget:
        """One that pays for everything, with as many seconds to search."""
        return replace(self, visits=float("inf"))

    def part(self, share: float) -> Budget:
        """A share of it."""
        return replace(self, visits=share * self.visits)

    def steps(self, size: int) -> float:
        """How many steps of a program with ``size`` instructions it pays for."""
        return self.visits / max(size, 1)

    def pays_for(self, steps: float, size: int) -> bool:
        """Whether it pays for ``steps`` steps of a program with ``size`` instructions."""
        return steps * size <= self.visits


AUTO = Budget(6_000)  # for ``auto`` without a search: about a second for all decisions
AMPLE = AUTO.ample  # for a planner that is asked alone, and for a search
EACH = AUTO  # for each of the programs that planners look through, whoever asks for how much
CARE_STEPS = (
    10  # that a program takes to be looked into with care: up to 600 instructions of the budget of ``auto``
)
SOME_STEPS = 3  # that it takes to be looked into at all: up to 2000
