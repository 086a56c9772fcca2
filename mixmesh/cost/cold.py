"""How much longer calls take after computing, and computing after a wait, than in a loop.

The code and the data of a collective's call leave the caches while a device computes: some of them at once,
the rest after some milliseconds. Those of the computing leave them while it waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WAIT_S = 0.02  # the wait after which computing was measured


@dataclass(frozen=True)
class Cold:
    """Extra seconds of the computing thread. In a call they are ``first_s`` after any computing, and up to
    ``more_s`` besides, of which 63 % have come after ``after_s`` seconds of computing. In computing they are
    ``waited_s`` after a wait of ``WAIT_S`` or more."""

    first_s: float = 0.0
    more_s: float = 0.0
    after_s: float = 1.0
    waited_s: float = 0.0

    def __bool__(self) -> bool:
        return self.first_s + self.more_s + self.waited_s > 0

    def extra_s(self, since_s: float) -> float:
        """The extra seconds of a call after ``since_s`` seconds of computing since the last one."""
        if since_s <= 0:
            return 0.0
        return self.first_s - self.more_s * math.expm1(-since_s / self.after_s)

    def after_wait_s(self, wait_s: float) -> float:
        """The extra seconds of computing after a wait, in proportion to it up to ``WAIT_S``."""
        return self.waited_s * min(wait_s / WAIT_S, 1.0)

    def scaled(self, factor: float) -> Cold:
        """The same where every second of a thread takes ``factor`` seconds."""
        mine = self.first_s, self.more_s, self.after_s, self.waited_s
        return Cold(*[seconds * factor for seconds in mine])


ALWAYS_WARM = Cold()
