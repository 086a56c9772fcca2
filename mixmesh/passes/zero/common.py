"""ZeRO stages 2 and 3: collectives inside every accumulation step, so the number of steps is common.

A full step lasts ``u = max_i t_i(m_i)``, the last one ``v = max_i t_i(last_i)``, ``last_i <= m_i``, and

step = (A - 1) (u + collective_s) + (v + collective_s)

Call *events* the times ``t_i(1), t_i(2), ...`` of all devices, in ascending order ``s_1 <= s_2 <= ...``: c
samples in one accumulation step take at least ``s_c`` seconds, and exactly that when they are the c cheapest.
So the only choice is c, the samples of a full step: then ``A = ceil(global_batch / c)``, the last step holds
the remaining ``r = global_batch - (A - 1) c`` samples, and

step(c) = (A - 1) s_c + s_r + A collective_s

(further steps would be empty, fewer do not hold the batch). Every c is tried. Poplar (AAAI'25) sweeps a time
budget for the full step and shrinks the last one; here the last one's time is counted when the full step is
chosen.
"""

from __future__ import annotations

import numpy as np

from .curves import Tables
from .separate import SLACK
from .shares import share_out


def split_together(tables: Tables, global_batch: int, collective_s: float) -> list[tuple[int, int, int]]:
    """``(micro_batch, accumulation_steps, last_micro_batch)`` per device, for the shortest step."""
    events = np.sort(np.concatenate([tables.of(i)[1:] for i in range(len(tables.kind))]))[:global_batch]
    full = np.arange(1, len(events) + 1)
    steps = -(-global_batch // full)
    rest = global_batch - (steps - 1) * full
    seconds = (steps - 1) * events + events[rest - 1] + steps * collective_s
    fastest = np.flatnonzero(seconds <= seconds.min() * SLACK)
    # steps never rise with c: the last c has the fewest steps, and the first c with as few is the most even
    c = int(fastest[np.searchsorted(-steps[fastest], -steps[fastest[-1]])])
    num_steps, num_last = int(steps[c]), int(rest[c])
    # the last step first, because no device may take more in it than in the full steps
    last = share_out(num_last, _within(tables, events[num_last - 1]))
    more = [n - least for n, least in zip(_within(tables, events[c]), last)]
    micro = [least + m for least, m in zip(last, share_out(int(full[c]) - num_last, more))]
    return [(m, num_steps, n) if m else (0, 0, 0) for m, n in zip(micro, last)]


def _within(tables: Tables, seconds: float) -> list[int]:
    """The largest micro-batch of every device within the time."""
    most = [int(np.searchsorted(t, seconds, side="right")) - 1 for t in tables.distinct]
    return [most[k] for k in tables.kind]
