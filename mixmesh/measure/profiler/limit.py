"""The wall-clock seconds that a profile may take, the same on all ranks.

Measuring stops when time is over, and uses the results so far: a device busy with other things, or a machine
under load, must not hold up a start. The rest is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...runtime.comm import Comm
from ...runtime.first_rank import largest

# shares of the budget by which each part has to be finished; the next part gets unused time
PROCESS, LINKS, BESIDE, REST, EARLY_STEPS = 0.35, 0.5, 0.6, 0.7, 0.76
OPERATORS, STEPS, WITHIN = 0.84, 0.94, 1.0
OPERATORS_LEAST = 0.15  # share of the budget that operators get in any case


def agreed(comm: Comm, values: Sequence[float]) -> list[float]:
    """The largest of every rank's values. Collective."""
    if comm.world_size == 1:
        return list(values)
    return largest(torch.tensor(values, dtype=torch.float64), "seconds of a profile").tolist()


@dataclass(frozen=True)
class Limit:
    """``budget_s`` seconds from the moment ``started`` of ``time.perf_counter``."""

    comm: Comm
    budget_s: float
    started: float

    @classmethod
    def of(cls, comm: Comm, budget_s: float) -> Limit:
        """A limit that ends ``budget_s`` seconds from now."""
        return cls(comm, budget_s, time.perf_counter())

    def left_s(self, share: float = 1.0) -> float:
        """The seconds until this share of the time is over, by this rank's clock; 0 once it is."""
        return max(self.started + share * self.budget_s - time.perf_counter(), 0.0)

    def is_past(self, share: float) -> bool:
        """Whether this share of the time is over on any rank. Collective; the same on all ranks."""
        (elapsed_s,) = agreed(self.comm, [time.perf_counter() - self.started])
        return elapsed_s > share * self.budget_s
