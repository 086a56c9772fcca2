"""Measures how long the optimizer takes in a step, and on a CPU calls of collectives and joining gradients.

Their code and data have left the caches by then, because the backward pass fills these with other things: a
call after 10 ms of computing takes three to five times the CPU time of one in a loop of calls. So a few
passes over the job's own model are interrupted for calls now and then, and for joining gradients. Both are
timed by the CPU time of their thread. Computing, in turn, takes longer after a wait: so one of every two
passes with the same calls also waits before them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ...base.least_squares import bounded_least_squares
from ...cost import ALWAYS_WARM, Cold, Curve, host_key
from ...cost.cold import WAIT_S
from ...frontend.trace.autocast import Autocast
from ...runtime.comm import Comm
from . import links
from .limit import WITHIN, Limit
from .meter import Meter
from .overlap import PIECE_BYTES, everyone_cases
from .steps import both_passes, cut_batch, optimizer_of, rows_of

MOST_STEPS, LEAST_STEPS = 8, 4  # pairs of steps; the optimizer's first one does not count
LEAST_CALLS = 12  # with fewer timed calls, there is no fit
COLLECTIVES = 4  # different ones that are called: the most usual ones, as all become cold alike
GAPS = (1, 1, 2, 2, 4, 8, 16)  # from one call to the next, the number of gradients that arrive
LEAST_IN_PASS = 6  # gaps are short enough for at least so many calls in a pass, if it has as many gradients
BUCKETS_BYTES = (2**18, 2**20, 2**21)
KEPT = 0.9  # share of the calls that count, those nearest to the fit: others were disturbed
AFTER_S = tuple(np.geomspace(1e-3, 64e-3, 25).tolist())  # the values of ``Cold.after_s`` that are tried

BOUNDS = np.zeros(2), np.full(2, np.inf)  # neither seconds are negative

Joins = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ShortCall:
    """A collective on a few values, and its seconds in a loop."""

    run: Callable[[], object]
    warm_s: float


@dataclass(frozen=True)
class Within:
    """The members of ``DeviceProfile`` that are measured here; optimizer seconds are those of ``Meter``, and
    None if no pass fits the device."""

    cold: Cold
    join_s: Joins
    optimizer_s_per_byte: float | None


@dataclass
class Found:
    """For each call the seconds of computing since the last one, and its extra seconds; for each join its
    bytes and seconds; for passes ``without`` and ``with_waits`` the seconds of computing after calls."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    joins: list[tuple[float, float]] = field(default_factory=list)
    without: list[tuple[float, int]] = field(default_factory=list)  # with the number of calls
    with_waits: list[tuple[float, int]] = field(default_factory=list)


def measure_within(
    comm: Comm,
    job: Any,
    samples: int,
    meter: Meter,
    host_s: dict[str, tuple[float, float]],
    join_s: Joins,
    limit: Limit,
    autocast: Autocast | None = None,
) -> Within:
    """Measures steps on this number of samples, at least ``LEAST_STEPS``. ``host_s`` and the given ``join_s``
    were measured in a loop. Collective: all ranks make the same calls, also one that has no memory for a
    pass.

    Under a quota an optimizer's step of some milliseconds falls within a burst or meets a pause of many times
    its length. Its CPU seconds do not, and are converted to real ones as those of operators are.
    """
    model, device = job.model, comm.device
    if any(p.is_meta for p in model.parameters()):
        return Within(ALWAYS_WARM, join_s, None)
    calls = short_calls(comm, host_s) if device.type == "cpu" else []
    params = [p for p in model.parameters() if p.requires_grad]
    batch = cut_batch(job.batch, rows_of(job.batch), samples, device) if samples else None
    optimizer = optimizer_of(job) if samples else None
    found, optimizer_s = Found(), []
    for number in range(MOST_STEPS):
        pair, is_second = divmod(number, 2)
        if number >= LEAST_STEPS and not is_second and limit.is_past(WITHIN):
            break
        # which of a pair waits changes from pair to pair
        between = Interruptions(calls, len(params), random.Random(pair), found, waits=is_second != pair % 2)
        if optimizer is not None:
            with interrupted(params if calls else [], between):
                both_passes(model, batch, device, autocast)
            # in memory that is used for the first time, the step takes twice as long
            optimizer_s.append(meter.once(optimizer.step))
            optimizer.zero_grad()
        between.finish()
    size_bytes = sum(p.nbytes for p in params)
    per_byte = statistics.median(optimizer_s[1:]) / max(size_bytes, 1) if optimizer_s else None
    cold = replace(fitted(found.calls), waited_s=after_waits(found))
    return Within(cold, with_cold(join_s, found.joins), per_byte)


def short_calls(comm: Comm, host_s: dict[str, tuple[float, float]]) -> list[ShortCall]:
    """The usual collectives between all ranks whose seconds in a loop are known. Collective."""
    size_bytes, out = PIECE_BYTES[0], []
    for case in everyone_cases(comm)[:COLLECTIVES]:
        line = host_s.get(host_key(case.collective, case.algorithm))
        if line is not None:
            channel = comm.channel(comm.everyone, "profile of calls within a step")
            run = links.prepared(comm, channel, case, links.rows_of(size_bytes))
            out.append(ShortCall(run, line[0] + line[1] * size_bytes))
    return out


class Interruptions:
    """The work between the gradients of one backward pass: calls after some of them, drawn alike on all
    ranks, with or without ``waits`` before them, and joins of as many as fill a bucket."""

    def __init__(
        self,
        calls: Sequence[ShortCall],
        num_params: int,
        draw: random.Random,
        found: Found,
        *,
        waits: bool = False,
    ) -> None:
        self.found, self.draw, self.place, self.waits = found, draw, 0, waits
        self.calls: deque[tuple[int, ShortCall]] = deque()
        gaps = [gap for gap in GAPS if gap <= max(num_params // LEAST_IN_PASS, 1)]
        place = draw.choice(gaps)
        while calls and place <= num_params:
            self.calls.append((place, draw.choice(calls)))
            place += draw.choice(gaps)
        self.timed, self.computing_s = 0, 0.0
        self.bucket: list[nn.Parameter] = []
        self.bucket_bytes = draw.choice(BUCKETS_BYTES)
        self.last_s = time.thread_time()

    def on_gradient(self, param: nn.Parameter) -> None:
        """Makes what follows a gradient that has arrived."""
        started = time.thread_time()
        self.place += 1
        if self.calls and self.calls[0][0] <= self.place:
            _, call = self.calls.popleft()
            self.note_computing(started)
            if self.waits:
                time.sleep(WAIT_S)
            call.run()
            ended = time.thread_time()
            if not self.waits:
                self.found.calls.append((started - self.last_s, ended - started - call.warm_s))
            self.timed, self.last_s = self.timed + 1, ended
        if param.grad is not None and param.grad.layout == torch.strided:
            self.bucket.append(param)
            self.join()

    def note_computing(self, now_s: float) -> None:
        """Adds the seconds of computing since the last call, if there was one."""
        if self.timed:
            self.computing_s += now_s - self.last_s

    def join(self) -> None:
        """Joins the gradients of a full bucket, which become views of it, as in training."""
        grads = [p.grad for p in self.bucket if p.grad is not None]
        size_bytes = sum(g.nbytes for g in grads)
        if size_bytes < self.bucket_bytes:
            return
        if len(grads) > 1:
            started = time.thread_time()
            flat = torch.cat([g.reshape(-1) for g in grads])
            for param, piece in zip(self.bucket, flat.split([g.numel() for g in grads])):
                if piece.dtype == param.dtype:
                    param.grad = piece.view(param.shape)
            self.found.joins.append((float(size_bytes), time.thread_time() - started))
        self.bucket, self.bucket_bytes = [], self.draw.choice(BUCKETS_BYTES)

    def finish(self) -> None:
        """Makes the calls that are left, which other ranks may have made, without timing them."""
        passes = self.found.with_waits if self.waits else self.found.without
        passes.append((self.computing_s, self.timed))
        while self.calls:
            self.calls.popleft()[1].run()


@contextmanager
def interrupted(params: Sequence[nn.Parameter], between: Interruptions) -> Iterator[None]:
    """A context in which each parameter's gradient, as it arrives, is followed by its interruptions."""
    handles = [p.register_post_accumulate_grad_hook(between.on_gradient) for p in params if p.is_leaf]
    between.last_s = time.thread_time()
    try:
        yield
        between.note_computing(time.thread_time())
    finally:
        for handle in handles:
            handle.remove()


def fitted(calls: Sequence[tuple[float, float]]) -> Cold:
    """The ``Cold`` nearest to these calls, of seconds since the last one and extra seconds: least squares,
    repeated without those farthest from the fit."""
    if len(calls) < LEAST_CALLS:
        return ALWAYS_WARM
    since_s, extra_s = np.array(calls).T
    best, least = ALWAYS_WARM, np.inf
    for after_s in AFTER_S:
        rise = -np.expm1(-since_s / after_s)
        columns, kept = np.stack([np.ones(len(calls)), rise], axis=1), np.ones(len(calls), bool)
        for _ in range(3):
            first_s, more_s = bounded_least_squares(columns[kept], extra_s[kept], *BOUNDS).tolist()
            errors = np.abs(first_s + more_s * rise - extra_s)
            kept = errors <= np.quantile(errors, KEPT)
        error = float(np.square(errors[kept]).sum())
        if error < least:
            best, least = Cold(first_s, more_s, after_s), error
    return best


def after_waits(found: Found) -> float:
    """The extra seconds of computing that came with each wait."""
    calls = sum(count for _, count in found.with_waits)
    extra_s = sum(s for s, _ in found.with_waits) - sum(s for s, _ in found.without)
    return max(extra_s / calls, 0.0) if calls else 0.0


def with_cold(join_s: Joins, joins: Sequence[tuple[float, float]]) -> Joins:
    """``join_s`` with the seconds per byte that joins within a step took longer."""
    if not (join_s and joins):
        return join_s
    in_loop = Curve(join_s)
    extra_s = sum(seconds - in_loop.at(size_bytes) for size_bytes, seconds in joins)
    per_byte = max(extra_s / sum(size_bytes for size_bytes, _ in joins), 0.0)
    return tuple((size_bytes, seconds + per_byte * size_bytes) for size_bytes, seconds in join_s)
