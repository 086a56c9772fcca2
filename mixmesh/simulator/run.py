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

# the parts of a run that change while it goes on without events, beside numbers
MOVING = "arriving busy carrying clock free has_gradients paced ready served under_way".split()


class Run:
    """The clocks of one simulated step, by kind of rank."""

    def __init__(
        self,
        parts: Parts,
        program: Program,
        sums: Sums,
        alike: Alike,
        keep_events: bool,
        leads: Sequence[float] = (),
    ) -> None:
        """``leads``: by kind, how far ahead of its usual pace it begins."""
        self.parts, self.program, self.keep_events = parts, program, keep_events
        self.alike, count = alike, len(alike.firsts)
        self.clock = [0.0] * count
        network = parts.network
        rests = [network.rests[r] for r in alike.firsts]
        self.rested_s = [s for s, _ in rests]
        self.briskly = [1 / speed for _, speed in rests]  # seconds after a rest of one that is usual
        self.can_rest = any(self.rested_s)
        self.began_with = list(leads) or [0.0] * count
        # when each kind would be as far at its usual pace, if it may be as far ahead as it is
        self.paced = [-lead for lead in self.began_with]
        self.busy = [0.0] * count
        self.under_way = [0.0] * count  # until when a collective of the kind is
        self.kinds = [alike.of(ranks) for _, ranks in network.numbers]  # that are on each channel
        self.slowdown = [parts.slowdown[r] for r in alike.firsts]
        self.slowed = [(k, s) for k, s in enumerate(self.slowdown) if s > 0]
        self.free = [0.0] * len(network.numbers)  # when each channel is
        self.carrying = [0.0] * len(network.numbers)  # until when each occupies links
        self.served = [0.0] * len(network.links)  # when each link has carried all that it was given
        self.link_busy_s = [0.0] * len(network.links)  # counted with events
        self.ready: dict[str, tuple[float, Call]] = {}  # results that nobody has waited for yet
        self.arriving: list[tuple[float, Call, int, str]] = []  # gradients to be taken in at the end
        self.communication = 0.0
        self.turn_s = 0.0  # when the first rank ends its forward pass
        self.events: list[Event] = []
        self.active = [True] * count  # whether the kind takes this micro-step
        self.has_gradients = [False] * count
        self.gathers, self.gather_of = sums.gathers, sums.reductions.gather_of
        self.gathered: list[tuple[float, Call, set[int]]] = []  # with the kinds that have not awaited it
        self.landed = 0  # how many of them somebody has awaited
        self.fetched = 0  # and how many everybody has
        self.begin(sums)

    def begin(self, sums: Sums) -> None:
        """The next backward pass makes these sums."""
        self.sums = sums
        self.left = [len(call.exchange.ranks) for call in sums.calls]
        self.issued = [0.0] * len(self.left)
        self.sum_end = [0.0] * len(self.left)

    def micro_steps(
        self, one: Pass, sums: Sums, active: list[bool], forward_s: Seconds, backward_s: Seconds
    ) -> None:
        """Micro-steps that are alike. Once they take equally long, so do all that follow."""
        self.active = active
        forward_s, backward_s = (
            [np.multiply(row, active) for row in rows] for rows in (forward_s, backward_s)
        )
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
                self.paced = [t + rest * d for t, d in zip(self.paced, took)]
                self.busy = [t + rest * d for t, d in zip(self.busy, took[count:])]
                self.communication += rest * took[-1]
                break
            before = took

    def micro_step(self, forward_s: Seconds, backward_s: Seconds, *, is_last: bool = True) -> None:
        """A forward and a backward pass; of the last one the loss is summed."""
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
        """The same step up to here, going on with other sums; none of them gathers what owners stepped."""
        made = copy(self)
        for name in MOVING:
            setattr(made, name, copy(getattr(self, name)))
        made.begin(sums)
        return made

    def accumulate(self, kinds: Iterable[int]) -> None:
        """A backward pass: every one but the first of a rank adds to gradients that are there."""
        for kind in kinds:
            if self.active[kind]:
                if self.has_gradients[kind]:
                    self.compute(kind, ACCUMULATION, self.added_s[kind])
                self.has_gradients[kind] = True

    @lazy
    def added_s(self) -> list[float]:
        """By kind, seconds of adding a micro-step's gradients to earlier ones."""
        seconds = self.parts.sheet.accumulation_s(self.program)
        return [seconds[rank] for rank in self.alike.firsts]

    def start_gathers(self) -> None:
        """Begins to gather what the owners have stepped, no more at a time than the runtime does."""
        under_way = sum(call.exchange.size_bytes for _, call, _ in self.gathered[self.landed :])
        for name, call in self.gathers[len(self.gathered) :]:
            if under_way >= IN_FLIGHT_BYTES:
                break
            kinds = set(self.kinds[call.channel])
            self.gathered.append((self.start(call, name), call, kinds))
            under_way += call.exchange.size_bytes

    def fetch(self, last: int) -> None:
        """Ranks await the gathers up to the ``last``, in order; with each that is there others may start."""
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
        seconds = self.parts.sheet.optimizer_s(self.program)
        for kind, rank in enumerate(self.alike.firsts):
            self.compute(kind, "optimizer", seconds[rank])

    def compute(self, kind: int, name: str, seconds: float, op: str = "") -> None:
        start = self.clock[kind]
        self.advance(kind, self.computed(kind, self.slowdown[kind], seconds) - start)
        end = self.clock[kind]
        self.busy[kind] += end - start
        if self.keep_events and seconds > 0:
            self.events.append(Event(self.alike.firsts[kind], "compute", name, start, end, op))

    def advance(self, kind: int, seconds: float) -> None:
        """A kind works for what are ``seconds`` at its usual pace: faster while it is rested.

        With u the time at which it would be as far at its usual pace, t its clock and v its speed after a
        rest, work of s seconds is done at ``max(u + s, t + s / v)``, and who waits until t has a u of
        ``t - rested_s`` at least. Both grow with all that they depend on: nothing gets slower by what gets
        faster.
        """
        self.paced[kind] += seconds
        self.clock[kind] = max(self.paced[kind], self.clock[kind] + seconds * self.briskly[kind])

    def until(self, end: float, kinds: Iterable[int]) -> None:
        """Kinds that are there before wait, and rest."""
        for k in kinds:
            if self.clock[k] < end:
                self.clock[k] = end
                self.paced[k] = max(self.paced[k], end - self.rested_s[k])

    @property
    def leads(self) -> list[float]:
        """By kind, how far ahead of its usual pace it is."""
        if not self.can_rest:
            return self.began_with
        return [max(clock - paced, 0.0) for clock, paced in zip(self.clock, self.paced)]

    def computed(self, kind: int, slowdown: float, seconds: float) -> float:
        """When a rank has computed for ``seconds``, slower while a collective of its own is under way."""
        start, until = self.clock[kind], self.under_way[kind]
        if slowdown <= 0 or until <= start:
            return start + seconds
        slow = start + seconds * (1 + slowdown)
        return slow if slow <= until else until + seconds - (until - start) / (1 + slowdown)

    def last(self, ranks: tuple[int, ...]) -> float:
        """When the last of these ranks is there."""
        return max([self.clock[k] for k in self.alike.of(ranks)])

    def occupy(self, call: Call, kinds: Iterable[int]) -> None:
        """Half of what a collective takes of the computing threads, and of what devices may compute."""
        if call.host:
            where = call.exchange.ranks
            for k in kinds:
                self.advance(k, call.host[where.index(self.alike.firsts[k])])
        if call.beside:
            where = call.exchange.ranks
            for k in kinds:
                self.paced[k] += call.beside[where.index(self.alike.firsts[k])]

    def start(self, call: Call, name: str) -> float:
        """All ranks issue a collective here; returns its end."""
        kinds, clock = self.kinds[call.channel], self.clock
        self.occupy(call, kinds)
        return self.communicate(call, name, max([clock[k] for k in kinds]))

    def communicate(self, call: Call, name: str, issued: float) -> float:
        """A collective that the last rank has issued; returns its end."""
        channel, exchange = call.channel, call.exchange
        start = max(issued, self.free[channel])
        carrying = start + call.longest
        served = self.served
        for link, seconds in call.links:
            before = served[link]
            served[link] = (before if before > start else start) + seconds
            if call.yields and served[link] > carrying:
                carrying = served[link]
        for other, _ in self.parts.network.rivals[channel]:
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
            what = (name, start, end, exchange.name, exchange.size_bytes)
            self.events += [Event(r, "communication", *what) for r in exchange.ranks]
        return end

    def shared(self, call: Call, start: float) -> float:
        """Until when a collective occupies links that others are using."""
        rivals = [
            (self.carrying[other] - start, links)
            for other, links in self.parts.network.rivals[call.channel]
            if self.carrying[other] > start
        ]
        return max(
            [
                start + seconds + sum(min(seconds, rest) for rest, links in rivals if link in links)
                for link, seconds in call.links
            ],
            default=start,
        )

    def wait(self, end: float, call: Call) -> None:
        kinds = self.kinds[call.channel]
        self.until(end, kinds)
        self.occupy(call, kinds)

    def go_through(self, timed: TimedPass, work_s: Seconds) -> None:
        """All events of a pass, in order."""
        table = np.array(work_s).reshape(len(work_s), len(self.clock))
        seconds = timed.counts @ table
        rows = iter(seconds.tolist())
        is_plain = not (self.keep_events or self.can_rest or self.slowed)
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
            kind = type(end)
            if kind is Await:
                self.wait(*self.ready.pop(end.name))
            elif kind is Start:
                self.begin_call(timed, end)
            elif kind is Ready:
                for k, ranks in self.sums.reductions.issues.get(end.point, ()):
                    self.issue(k, ranks)
            elif end is not None and end.name in self.gather_of:
                self.fetch(self.gather_of[end.name])

    def begin_call(self, timed: TimedPass, start: Start) -> None:
        """All ranks issue a collective, which is awaited by name or taken in at the end."""
        call = timed.calls[start.number]
        end_s = self.start(call, start.name)
        if start.value:
            self.ready[start.value] = (end_s, call)
        else:
            self.arriving.append((end_s, call, *timed.product_of(start)))

    def work_in_turn(
        self, timed: TimedPass, works: Iterable[int], computes: Iterable[Compute], work_s: Seconds
    ) -> None:
        """As ``work``, with an event for each of them."""
        for work, compute in zip(works, computes):
            name, op = timed.order.name_of(compute)
            for kind, s in enumerate(work_s[work]):
                self.compute(kind, name, s, op)

    def work(self, seconds: list[float]) -> None:
        """A run of computations that takes so long on each kind."""
        clock, busy = self.clock, self.busy
        if self.can_rest:
            for kind, s in enumerate(seconds):
                self.compute(kind, "", s)
            return
        slow_ends = [(k, self.computed(k, slowdown, seconds[k])) for k, slowdown in self.slowed]
        for kind, s in enumerate(seconds):
            clock[kind] += s
            busy[kind] += s
        for k, end in slow_ends:
            busy[k] += end - clock[k]
            clock[k] = end

    def issue(self, k: int, ranks: tuple[int, ...]) -> None:
        """These ranks' part in a gradient sum is there."""
        call = self.sums.calls[k]
        self.occupy(call, self.alike.of(ranks))
        self.issued[k] = max(self.issued[k], self.last(ranks))
        self.left[k] -= len(ranks)
        if not self.left[k]:
            self.sum_end[k] = self.communicate(call, self.sums.reductions.names[k], self.issued[k])

    def end_of_backward(self, work_s: Seconds) -> None:
        """Issues what is left; then every rank takes in what arrives, and waits for its sums."""
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
