"""The search's trials on a set of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isclose


@dataclass
class Tried:
    """Trials on a set of devices: programs by number and shape, the first program at each price, and the
    lower bounds of their steps with free gradient sums (``floors_s``) and with the real ones
    (``least_s``)."""

    seen: set[int] = field(default_factory=set)
    by_price: dict[float, int] = field(default_factory=dict)
    floors_s: list[float] = field(default_factory=list)
    least_s: list[float] = field(default_factory=list)
    # cost of a program that cuts classes, by price (None: without a price)
    cutting_classes: dict[float | None, float] = field(default_factory=dict)

    is_beaten: bool = False  # the least sum of a step is so large that no program here can be the fastest
    roomy: bool = True  # no tried program needs more memory than there is

    def holds(self, floor_s: float, least_s: float) -> bool:
        """Whether a program with these times was tried and would not do better if it needed less memory."""
        bounds = zip(self.floors_s, self.least_s)
        return self.roomy and any(isclose(floor_s, a) and isclose(least_s, b) for a, b in bounds)

    @property
    def same_at_both_ends(self) -> bool:
        return len(self.by_price) == 2 and len(set(self.by_price.values())) == 1
