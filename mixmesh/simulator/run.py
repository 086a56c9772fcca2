"""The clocks of one simulated step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from operator import add

import numpy as np

from ..base.lazy import lazy
from ..base.timeline import ACCUMULATION, LOSS_SUM, Event
from ..cost.micro_steps import Pass
from ..cost.sums import IN_FLIGHT_BYTES
from ..lang.ir import Program
from ..step import AT_THE_END, Alike, Await, Compute, Ready, Start
from .sums import Sums
from .timed import Parts, TimedPass
from .values import Call, Seconds

# the containers that change in a run without events
CHANGING = (
    "arriving busy carrying clock free has_gradients ready served since_s under_way usual_clock waits".split()
)


class Run:
    """The clocks of one simulated step, by kind of rank.

    A device under a quota has burst credit (a token bucket): after a wait it runs faster until its clock is
    as far as at its usual pace. ``usual_clock`` is its clock less its credit.
    """

    def __init__(
        self,
        parts: Parts,
        program: Program,
        sums: Sums,
        alike: Alike,
        keep_events: bool,
        credit_s: Sequence[float] = (),
    ) -> None:
        """``credit_s`` is the burst credit of each kind at the beginning."""
        self.parts, self.program, self.keep_events = parts, program, keep_events
        self.alike, count = alike, len(alike.firsts)
        self.clock = [0.0] * count
        network = parts.network
        rests = [network.rests[r] for r in alike.firsts]
        self.most_credit_s = [s for s, _ in rests]
        # real seconds for a second of usual work, while there is credit
        self.burst_s = [1 / speed for _, speed in rests]
        self.has_credit = any(self.most_credit_s)
        self.first_credit_s = list(credit_s) or [0.0] * count
        self.usual_clock = [-credit for credit in self.first_credit_s]
        self.busy = [0.0] * count
        self.under_way = [0.0] * count  # the end of each kind's last collective
        self.kinds = [alike.of(ranks) for _, ranks in network.numbers]  # the kinds of ranks on each channel
        self.slowdown = [parts.slowdown[r] for r in alike.firsts]
        self.cold = [parts.cold[r] for r in alike.firsts]
        self.has_cold = any(self.cold)
        self.since_s = [0.0] * count  # seconds of computing since each kind's last call of a collective
        self.waits = [False] * count  # whether each kind has computed nothing since it issued a collective
        self.slowed = [(k, s) for k, s in enumerate(self.slowdown) if s > 0]
        self.free = [0.0] * len(network.numbers)  # the end of the last collective on each channel
        self.carrying = [0.0] * len(network.numbers)  # the time until which each channel occupies links
        self.served = [0.0] * len(network.links)  # the time at which each link has carried all its traffic
        self.link_busy_s = [0.0] * len(network.links)  # counted only in a run with events
        self.ready: dict[str, tuple[float, Call]] = {}  # results that are not yet awaited
        # gradients that are accepted at the end of the pass
        self.arriving: list[tuple[float, Call, int, str]] = []
        self.communication = 0.0
        self.turn_s = 0.0  # the time at which the first rank ends its forward pass
        self.events: list[Event] = []
        self.active = [True] * count  # kinds that run this micro-batch
        self.has_gradients = [False] * count
        self.gathers, self.gather_of = sums.gathers, sums.reductions.gather_of
        self.gathered: list[tuple[float, Call, set[int]]] = []  # with the kinds that have not yet awaited it
        self.landed = 0  # the number of gathers that any kind has awaited
        self.fetched = 0  # the number of gathers that all kinds have awaited
        self.begin(sums)

    def begin(self, sums: Sums) -> None:
        """Prepares for the reductions of the next backward pass."""
        self.sums = sums
        self.left = [len(call.exchange.ranks) for call in sums.calls]
        self.issued = [0.0] * len(self.left)
        self.sum_end = [0.0] * len(self.left)

    def micro_steps(
        self, one: Pass, sums: Sums, active: list[bool], forward_s: Seconds, backward_s: Seconds
    ) -> None:
        """Runs equal micro-batches. When two in a row take equally long, so will all that follow."""
        self.active = active
        forward_s = [np.multiply(row, active).tolist() for row in forward_s]
        backward_s = [np.multiply(row, active).tolist() for row in backward_s]
        before: list[float] = []
        for n in range(one.repeats):
            start = [*self.clock, *self.busy, self.communication]
            self.begin(sums)
            self.micro_step(forward_s, backward_s, is_last=one.is_last)
            took = [b - a for a, b in zip(start, (*self.clock, *self.busy, self.communication))]
            if before and not self.keep_events and np.allclose(took, before, rtol=1e-9, atol=0.0):
                rest = one.repeats - 1 - n
                count = len(self.clock)
                self.clock = [t + rest * d for t, d in zip(self.clock, took)]
                self.usual_clock = [t + rest * d for t, d in zip(self.usual_clock, took)]
                self.busy = [t + rest * d for t, d in zip(self.busy, took[count:])]
                self.communication += rest * took[-1]
                break
            before = took

    def micro_step(self, forward_s: Seconds, backward_s: Seconds, *, is_last: bool = True) -> None:
        """Runs a forward and a backward pass; the last micro-batch also sums the loss."""
        self.forward_pass(forward_s, is_last=is_last)
        self.backward_pass(backward_s)

    def forward_pass(self, seconds: Seconds, *, is_last: bool = True) -> None:
        self.go_through(self.parts.forward, seconds)
        if self.gathers:
            self.fetch(len(self.gathers) - 1)
        self.turn_s = min(self.clock)
        if is_last and self.parts.loss is not None:
            self.start(self.parts.loss, LOSS_SUM)

    def backward_pass(self, seconds: Seconds) -> None:
        self.accumulate(range(len(self.clock)))
        self.go_through(self.parts.backward, seconds)
        self.end_of_backward(seconds)

    def with_sums(self, sums: Sums) -> Run:
        """A copy of this run that continues with other reductions, none of which gathers parameters."""
        twin = copy(self)
        for name in CHANGING:
            setattr(twin, name, copy(getattr(self, name)))
        twin.begin(sums)
        return twin

    def accumulate(self, kinds: Iterable[int]) -> None:
        """Adds the gradients of a backward pass to earlier ones, if there are any."""
        for kind in kinds:
            if self.active[kind]:
                if self.has_gradients[kind]:
                    self.compute(kind, ACCUMULATION, self.added_s[kind])
                self.has_gradients[kind] = True

    @lazy
    def added_s(self) -> list[float]:
        """Seconds, by kind, of adding a micro-batch's gradients to earlier ones."""
        return self.parts.sheet.accumulation_s(self.program, self.alike.firsts)

    def start_gathers(self) -> None:
        """Starts gathers of the parameters that shard owners stepped, as many at a time as the runtime
        does."""
        under_way = sum(call.exchange.size_bytes for _, call, _ in self.gathered[self.landed :])
        for name, call in self.gathers[len(self.gathered) :]:
            if under_way >= IN_FLIGHT_BYTES:
                break
            kinds = set(self.kinds[call.channel])
            self.gathered.append((self.start(call, name), call, kinds))
            under_way += call.exchange.size_bytes

    def fetch(self, last: int) -> None:
        """Awaits the gathers up to the ``last``, in order; the end of each may start others."""
        for n in range(self.fetched, last + 1):
            end, call, waiting = self.gathered[n]
            kinds = [k for k in waiting if self.active[k]]
            self.until(end, kinds)
            waiting.difference_update(kinds)
            self.occupy(call, kinds)
            if n == self.landed:
                self.landed += 1
                self.start_gathers()
            if n == self.fetched and not waiting:
                self.fetched += 1

    def optimizer(self) -> None:
        for kind, seconds in enumerate(self.parts.sheet.optimizer_s(self.program, self.alike.firsts)):
            self.compute(kind, "optimizer", seconds)

    def compute(self, kind: int, name: str, seconds: float, op: str = "") -> None:
        start = self.clock[kind]
        self.since_s[kind] += seconds
        self.waits[kind] &= seconds <= 0
        self.advance(kind, self.end_of_work(kind, self.slowdown[kind], seconds) - start)
        end = self.clock[kind]
        self.busy[kind] += end - start
        if self.keep_events and seconds > 0:
            self.events.append(Event(self.alike.firsts[kind], "compute", name, start, end, op))

    def advance(self, kind: int, seconds: float) -> None:
        """Runs work of ``seconds`` at the usual pace, which is shorter while there is burst credit.

        With t the clock, u the usual clock and v the speed with credit, work of s seconds ends at ``max(u +
        s, t + s / v)``. After a wait until t, u is at least ``t - most_credit_s``. Both grow with all that
        they depend on, so nothing that gets faster makes them later.
        """
        self.usual_clock[kind] += seconds
        self.clock[kind] = max(self.usual_clock[kind], self.clock[kind] + seconds * self.burst_s[kind])

    def until(self, end: float, kinds: Iterable[int]) -> None:
        """Makes kinds wait until ``end``, if they are earlier, and gain burst credit."""
        for k in kinds:
            if self.clock[k] < end:
                self.clock[k] = end
                self.usual_clock[k] = max(self.usual_clock[k], end - self.most_credit_s[k])

    @property
    def credit_s(self) -> list[float]:
        """The burst credit of each kind now."""
        if not self.has_credit:
            return self.first_credit_s
        return [max(clock - usual, 0.0) for clock, usual in zip(self.clock, self.usual_clock)]

    def end_of_work(self, kind: int, slowdown: float, seconds: float) -> float:
        """The end of ``seconds`` of computing, which is slower while a collective of the rank is under
        way."""
        start, until = self.clock[kind], self.under_way[kind]
        if slowdown <= 0 or until <= start:
            return start + seconds
        slow = start + seconds * (1 + slowdown)
        return slow if slow <= until else until + seconds - (until - start) / (1 + slowdown)

    def cold_s(self, kind: int) -> float:
        """The extra seconds of a call that is issued now."""
        self.waits[kind] = True
        since_s, self.since_s[kind] = self.since_s[kind], 0.0
        return self.cold[kind].extra_s(since_s)

    def occupy(self, call: Call, kinds: Iterable[int], *, issues: bool = False) -> None:
        """Spends half of the computing time that a collective takes, and of the burst credit; what comes on
        top after computing belongs to the half that ``issues`` it."""
        if call.host:
            where = call.exchange.ranks
            for k in kinds:
                seconds = call.host[where.index(self.alike.firsts[k])]
                self.advance(k, seconds + self.cold_s(k) if issues and self.has_cold else seconds)
        if call.overlapped:
            where = call.exchange.ranks
            for k in kinds:  # credit that is not there cannot be spent
                spent = self.usual_clock[k] + call.overlapped[where.index(self.alike.firsts[k])]
                self.usual_clock[k] = max(self.usual_clock[k], min(spent, self.clock[k]))

    def start(self, call: Call, name: str) -> float:
        """Makes all ranks issue a collective now, and returns its end."""
        kinds, clock = self.kinds[call.channel], self.clock
        self.occupy(call, kinds, issues=True)
        return self.communicate(call, name, max([clock[k] for k in kinds]))

    def communicate(self, call: Call, name: str, issued: float) -> float:
        """Runs a collective that all ranks have issued, the last one at ``issued``, and returns its end."""
        channel, exchange = call.channel, call.exchange
        start = max(issued, self.free[channel])
        carrying = start + call.longest
        served = self.served
        for link, seconds in call.links:
            before = served[link]
            served[link] = (before if before > start else start) + seconds
            if call.yields and served[link] > carrying:
                carrying = served[link]
        for other in self.parts.network.rivals[channel]:
            if self.carrying[other] > start:
                carrying = max(carrying, self.shared(call, start))
                break
        end = max(start + call.seconds, carrying)
        self.free[channel], self.carrying[channel] = end, carrying
        end += call.lag_s
        self.communication += call.seconds
        if self.slowed:
            for k in self.kinds[channel]:
                self.under_way[k] = max(self.under_way[k], end)
        if self.keep_events:
            for link, seconds in call.links:
                self.link_busy_s[link] += seconds
            self.events += [
                Event(r, "communication", name, start, end, exchange.name, exchange.size_bytes)
                for r in exchange.ranks
            ]
        return end

    def shared(self, call: Call, start: float) -> float:
        """The time until which a collective occupies links that others are using."""
        network, longest_s = self.parts.network, 0.0
        # the seconds for which each rival still occupies its links
        rests = {
            other: self.carrying[other] - start
            for other in network.rivals[call.channel]
            if self.carrying[other] > start
        }
        for link, seconds in call.links:  # loops: this is most of the simulation of many machines
            total = seconds
            for other in network.crossing[link]:
                if other in rests:
                    rest = rests[other]
                    total += seconds if seconds < rest else rest
            if total > longest_s:
                longest_s = total
        return start + longest_s

    def wait(self, end: float, call: Call) -> None:
        kinds = self.kinds[call.channel]
        self.until(end, kinds)
        self.occupy(call, kinds)

    def receive(self, name: str) -> None:
        """Awaits the result of a collective within a pass."""
        end_s, call = self.ready.pop(name)
        self.wait(end_s, call)
        if self.has_cold:
            self.wake(call)

    def wake(self, call: Call) -> None:
        """Spends what computing takes longer after a wait for a collective that was awaited at once. The
        collective's own seconds count, and not the wait for later ranks: a rank that gets faster waits for
        longer, and must not end later."""
        for k in self.kinds[call.channel]:
            if self.waits[k]:
                self.waits[k] = False
                self.advance(k, self.cold[k].after_wait_s(call.seconds))

    def go_through(self, timed: TimedPass, work_s: Seconds) -> None:
        """Runs all events of a pass, in order."""
        table = np.array(work_s).reshape(len(work_s), len(self.clock))
        seconds = timed.counts @ table
        rows = iter(seconds.tolist())
        is_plain = not (self.keep_events or self.has_credit or self.has_cold or self.slowed)
        if is_plain:
            self.busy = (seconds.sum(axis=0) + self.busy).tolist()
        for works, computes, end in timed.segments:
            if works:
                if is_plain:
                    self.clock = [*map(add, self.clock, next(rows))]
                elif self.keep_events:
                    next(rows)
                    self.work_in_turn(timed, works, computes, work_s)
                else:
                    self.work(next(rows))
            if isinstance(end, Await):
                self.receive(end.name)
            elif isinstance(end, Start):
                self.begin_call(timed, end)
            elif isinstance(end, Ready):
                for k, ranks in self.sums.reductions.issues.get(end.point, ()):
                    self.issue(k, ranks)
            elif end is not None and end.name in self.gather_of:
                self.fetch(self.gather_of[end.name])

    def begin_call(self, timed: TimedPass, start: Start) -> None:
        """Makes all ranks issue a collective, which is awaited by name or accepted at the end."""
        call = timed.calls[start.number]
        end_s = self.start(call, start.name)
        if start.value:
            self.ready[start.value] = (end_s, call)
        else:
            self.arriving.append((end_s, call, *timed.product_of(start)))

    def work_in_turn(
        self, timed: TimedPass, works: Iterable[int], computes: Iterable[Compute], work_s: Seconds
    ) -> None:
        """Like ``work``, with an event for each computation."""
        for work, compute in zip(works, computes):
            name, op = timed.order.name_of(compute)
            for kind, s in enumerate(work_s[work]):
                self.compute(kind, name, s, op)

    def work(self, seconds: list[float]) -> None:
        """Runs several computations, with their total seconds on each kind."""
        clock, busy = self.clock, self.busy
        if self.has_credit or self.has_cold:
            for kind, s in enumerate(seconds):
                self.compute(kind, "", s)
            return
        slow_ends = [(k, self.end_of_work(k, slowdown, seconds[k])) for k, slowdown in self.slowed]
        for kind, s in enumerate(seconds):
            clock[kind] += s
            busy[kind] += s
        for k, end in slow_ends:
            busy[k] += end - clock[k]
            clock[k] = end

    def issue(self, k: int, ranks: tuple[int, ...]) -> None:
        """Makes these ranks issue a gradient reduction."""
        call = self.sums.calls[k]
        # usually all ranks at once; a look-up would hash them
        kinds = self.kinds[call.channel] if ranks is call.exchange.ranks else self.alike.of(ranks)
        self.occupy(call, kinds, issues=True)
        self.issued[k] = max([self.issued[k], *[self.clock[kind] for kind in kinds]])
        self.left[k] -= len(ranks)
        if not self.left[k]:
            self.sum_end[k] = self.communicate(call, self.sums.reductions.names[k], self.issued[k])

    def end_of_backward(self, work_s: Seconds) -> None:
        """Issues the remaining reductions; then every rank accepts arriving gradients and waits for all."""
        at_the_end = self.sums.reductions.issues.get(AT_THE_END, ())
        for k, ranks in at_the_end:
            if k not in self.sums.reductions.late:
                self.issue(k, ranks)
        for end, call, work, name in self.arriving:
            self.wait(end, call)
            if work >= 0:
                for kind in self.kinds[call.channel]:
                    self.compute(kind, name, work_s[work][kind], "aten.mm")
        self.arriving.clear()
        for k, ranks in at_the_end:
            if k in self.sums.reductions.late:
                self.issue(k, ranks)
        for end, call in zip(self.sum_end, self.sums.calls):
            self.wait(end, call)
        for channel, kinds in enumerate(self.kinds):
            end = self.free[channel]
            if end > 0:
                end = max([end, *(self.served[link] for link in self.parts.network.crossed[channel])])
            self.until(end, [k for k in kinds if self.active[k]])
