"""A clock that counts only the seconds in which a process was able to observe others."""

from __future__ import annotations

import time


class AwakeClock:
    """A clock that stands still while this process is stopped, or its interpreter is locked, so that this
    time does not count as silence of the others. The watching thread calls ``tick`` regularly."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ticked_at = time.monotonic()

    def tick(self, most_s: float) -> None:
        """Advances the clock to this moment, but by at most ``most_s`` seconds."""
        now = time.monotonic()
        self.now_s += min(now - self._ticked_at, most_s)
        self._ticked_at = now
