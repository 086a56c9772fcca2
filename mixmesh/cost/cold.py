"""How much longer a call takes after other work than in a loop of such calls.

The code and the data of a collective's call leave the caches while a device computes: some of them at once,
the rest after some milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cold:
    """Extra seconds of the computing thread in a call: ``first_s`` after any computing, and up to ``more_s``
    besides, of which 63 % have come after ``after_s`` seconds of computing."""

    first_s: float = 0.0
    more_s: float = 0.0
    after_s: float = 1.0

    def __bool__(self) -> bool:
        return self.first_s + self.more_s > 0

    def extra_s(self, since_s: float) -> float:
        """The extra seconds of a call after ``since_s`` seconds of computing since the last one."""
        if since_s <= 0:
            return 0.0
        return self.first_s - self.more_s * math.expm1(-since_s / self.after_s)

    def scaled(self, factor: float) -> Cold:
        """The same where every second takes ``factor`` seconds."""
        return Cold(self.first_s * factor, self.more_s * factor, self.after_s * factor)


ALWAYS_WARM = Cold()
