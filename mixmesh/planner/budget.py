"""The limit on planning, as one value that is handed down.

The unit is a *visit*: one instruction of a program, or one node of a graph, in a simulated step. Everything
that the planner tries costs a number of steps, so larger programs get fewer trials. Visits are counted and
not timed, so that a plan depends on the job and the cluster and not on how fast the planning machine is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SEARCH_S = 20.0


@dataclass(frozen=True)
class Budget:
    """The ``visits`` allowed for one decision, and ``search_s`` for the open-ended planners (placed, heterog,
    tag), the only ones that use a clock."""

    visits: float
    search_s: float = SEARCH_S

    @property
    def is_ample(self) -> bool:
        """Whether it pays for everything."""
        return self.visits == float("inf")

    @property
    def ample(self) -> Budget:
        """A budget that pays for everything, with the same seconds for searches."""
        return replace(self, visits=float("inf"))

    def part(self, share: float) -> Budget:
        """A share of this budget."""
        return replace(self, visits=share * self.visits)

    def steps(self, size: int) -> float:
        """The number of steps of a program with ``size`` instructions that the budget pays for."""
        return self.visits / max(size, 1)

    def pays_for(self, steps: float, size: int) -> bool:
        """Whether it pays for ``steps`` steps of a program with ``size`` instructions."""
        return steps * size <= self.visits


AUTO = Budget(6_000)  # for ``auto`` without a search: about a second for all decisions
AMPLE = AUTO.ample  # for a single named planner, and for a search
EACH = AUTO  # for each program that a planner examines, whichever planner it is
# steps that allow a thorough examination: up to 600 instructions within the budget of ``auto``
CARE_STEPS = 10
SOME_STEPS = 3  # steps that allow any examination at all: up to 2000 instructions
