"""A clock that counts only the seconds in which a process could look at others."""

from __future__ import annotations

import time


class AwakeClock:
    """Stands still while this process is stopped, or its interpreter is locked: what was not heard meanwhile
    is not silence of the others. ``tick`` is called again and again by the thread that watches."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ticked_at = time.monotonic()

    def tick(self, most_s: float) -> None:
        """Goes on to this moment, by ``most_s`` seconds at most."""
        now = time.monotonic()
        self.now_s += min(now - self._ticked_at, most_s)
        self._ticked_at = now
