"""Estimates the seconds of a strategy's step group by group, for searches that need thousands of estimates.

The order of events is the simulator's, but coarser. Groups run in order on their ranks, and in reverse in the
backward pass; a transfer between groups of different ratios stops the ranks of both until it arrives.
Gradients are summed during the backward pass, group by group, and parameters stepped by owners are gathered
during the forward pass, on shared links. Only lasting memory counts: parameters, gradients, optimizer state,
and values for the backward pass. The simulator decides in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...cost.exchanges import Exchange, exchange_of, sent_between
from ...cost.resources import Link
from ...lang.ir import Levels, Ratio, shard_sizes, support
from ...lang.optimizer_states import ADAM, OptimizerStates
from .lower import Placed
from .strategy import Action, Space

By = tuple[tuple[int, float], ...]  # by rank


@dataclass(frozen=True)
class Estimate:
    """The step and figures per rank, as in a ``Timeline``. ``done_s``: the end of each group's forward
    pass."""

    step_s: float
    peak_memory_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    done_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective, with the seconds for which it occupies each link."""

    seconds: float
    ranks: tuple[int, ...]
    links: tuple[tuple[Link, float], ...]


@dataclass(frozen=True, slots=True)
class _Cost:
    """A placed group: seconds and bytes on its ranks, its collectives, and the seconds of those ``inside``
    it, between its own operators, forward and backward."""

    ranks: tuple[int, ...]
    forward: By
    backward: By
    optimizer: By
    fixed: By  # bytes that stay over the step
    kept: By  # from the forward pass to the backward
    passing: By  # additional bytes in the backward pass
    inside: tuple[float, float]
    sum: _Call | None
    gather: _Call | None


class Estimator:
    """Estimates strategies of one space. ``levels`` are the levels of gradient sums."""

    def __init__(
        self, space: Space, optimizer_states: OptimizerStates = ADAM, levels: Levels | None = None
    ) -> None:
        self.levels = levels
        self.space, self.costs, self.optimizer_states = space, space.costs, optimizer_states
        self.world_size = space.program.world_size
        self.constant = self.costs.memory_constants_bytes()
        self._costs: dict[tuple[int, Placed], _Cost] = {}
        self._calls: dict[tuple[Ratio, Ratio, int], _Call | None] = {}
        self._shares = lru_cache(lambda r: tuple(n / space.batch for n in shard_sizes(space.batch, r)))
        self._inside = _inside(space)
        # for each group, the values of others that it uses
        self.used: list[list[int]] = [[] for _ in space.groups]
        for n, value in enumerate(space.grouping.values):
            for k in value.targets:
                self.used[k].append(n)

    def __call__(self, actions: Sequence[Action | Placed]) -> Estimate:
        placed = [a.placed if isinstance(a, Action) else a for a in actions]
        costs = [self._cost(k, p) for k, p in enumerate(placed)]
        run = _Run(self.world_size)
        held = [float(size) for size in self.constant]
        for cost in costs:
            run.compute(cost.optimizer)
            _add(held, cost.fixed)
        peaks = list(held)
        stepped = [run.beside(cost.gather) if cost.gather else 0.0 for cost in costs]
        moved: set[tuple[int, Ratio]] = set()  # values that are already where they are needed
        back: list[list[_Call]] = [[] for _ in costs]
        ends = []
        for k, cost in enumerate(costs):
            run.wait(cost.ranks, stepped[k])
            ratio = placed[k].ratio
            for n in self.used[k]:
                value = self.space.grouping.values[n]
                source = placed[value.source].ratio
                if ratio == source or (n, ratio) in moved:
                    continue
                moved.add((n, ratio))
                call = self._move(source, ratio, value.size_bytes)
                if call is not None:
                    run.meet(call)
                    _add(held, [(r, value.size_bytes * self._shares(ratio)[r]) for r in cost.ranks])
                    move_back = self._move(ratio, source, value.size_bytes) if value.gradient else None
                    if move_back is not None:
                        back[k].append(move_back)
            run.compute(cost.forward)
            run.together(cost.ranks, cost.inside[0])
            _add(held, cost.kept)
            for rank, size in cost.passing:  # in its backward pass everything behind it has been freed
                peaks[rank] = max(peaks[rank], held[rank] + size)
            ends.append(max(run.clock[rank] for rank in cost.ranks))
        run.turn()
        for cost, calls in zip(reversed(costs), reversed(back)):
            run.compute(cost.backward)
            run.together(cost.ranks, cost.inside[1])
            for call in calls:
                run.meet(call)
            if cost.sum:
                run.beside(cost.sum)
        return Estimate(run.end_s, tuple(map(round, peaks)), tuple(run.busy), tuple(ends))

    def held_bytes(self, k: int, placed: Placed) -> Iterator[tuple[int, float, float]]:
        """The bytes that a group holds on each rank that takes part: until its backward pass, and during
        it."""
        cost = self._cost(k, placed)
        for (rank, fixed), (_, kept), (_, passing) in zip(cost.fixed, cost.kept, cost.passing):
            yield rank, fixed + kept, passing

    def _move(self, source: Ratio, target: Ratio, size_bytes: int) -> _Call | None:
        """The move of a value with ``size_bytes`` cut by ``source``; None if it stays."""
        key = (source, target, size_bytes)
        if key not in self._calls:
            src, dst = self._shares(source), self._shares(target)
            ranks = tuple(sorted({*support(source), *support(target)}))
            exchange = Exchange("all_to_all", size_bytes, ranks, sent_between(src, dst))
            self._calls[key] = None if src == dst else self._call(exchange)
        return self._calls[key]

    def _call(self, exchange: Exchange) -> _Call:
        s_per_byte = exchange.link_s_per_byte(self.costs.cluster).items()
        links = tuple((link, s * exchange.size_bytes) for link, s in s_per_byte)
        return _Call(exchange.seconds(self.costs), exchange.ranks, links)

    def _cost(self, k: int, placed: Placed) -> _Cost:
        key = (k, placed)
        if key not in self._costs:
            self._costs[key] = self._make(k, placed)
        return self._costs[key]

    def _make(self, k: int, placed: Placed) -> _Cost:
        group, ranks, owners = self.space.groups[k], support(placed.ratio), placed.owners
        shares, class_of = self._shares(placed.ratio), self.costs.class_of
        size, states = group.param_bytes, self.optimizer_states.kept
        # every rank has the whole parameter, but only its own rows of the gradient and optimizer state
        owned = {r: size * (1.0 if owners is None else owners[r]) for r in ranks}

        def seconds(lines) -> By:
            return tuple((r, lines[class_of[r]][0] + lines[class_of[r]][1] * shares[r]) for r in ranks)

        def call(name: str, wanted: bool) -> _Call | None:
            if not wanted or not size or len(ranks) < 2:
                return None
            parts = self.levels.parts(ranks, size) if self.levels and name == "all_reduce" else ()
            return self._call(Exchange(name, size, ranks, levelled=bool(parts)))

        def inside_s(exchanges: Iterable[Exchange]) -> float:
            return sum(Exchange(e.name, e.size_bytes, ranks).seconds(self.costs) for e in exchanges)

        forward, backward = self._inside.get(k, ((), ()))
        return _Cost(
            ranks,
            seconds(group.forward),
            seconds(group.backward),
            tuple((r, self.costs.optimizer_s(r, owned[r])) for r in ranks),
            tuple((r, size + owned[r] * (1 + states)) for r in ranks),
            tuple((r, group.kept_bytes * shares[r]) for r in ranks),
            tuple((r, group.passing_bytes * shares[r]) for r in ranks),
            (inside_s(forward), inside_s(backward)),
            call("all_reduce" if owners is None else "reduce_scatter", True),
            call("all_gather", owners is not None),
        )


class _Run:
    """The clocks of one step: by rank, and for each link the time until which it is busy."""

    def __init__(self, world_size: int) -> None:
        self.clock, self.busy = [0.0] * world_size, [0.0] * world_size
        self.served: dict[Link, float] = {}
        self.free: dict[tuple[int, ...], float] = {}
        self.beside_s = 0.0

    @property
    def end_s(self) -> float:
        return max(self.beside_s, *self.clock)

    def compute(self, seconds: By) -> None:
        for rank, s in seconds:
            self.clock[rank] += s
            self.busy[rank] += s

    def wait(self, ranks: tuple[int, ...], until: float) -> None:
        for rank in ranks:
            self.clock[rank] = max(self.clock[rank], until)

    def together(self, ranks: tuple[int, ...], seconds: float) -> None:
        if seconds and len(ranks) > 1:
            self.wait(ranks, max(self.clock[rank] for rank in ranks) + seconds)

    def meet(self, call: _Call) -> None:
        """Runs a collective that its ranks wait for; it takes longer if its links are in use."""
        start = max(self.clock[rank] for rank in call.ranks)
        others = max((min(s, self.served.get(link, 0.0) - start) for link, s in call.links), default=0.0)
        self.wait(call.ranks, start + call.seconds + max(others, 0.0))

    def beside(self, call: _Call) -> float:
        """Runs a collective whose result nobody waits for now; returns its end."""
        start = max(self.free.get(call.ranks, 0.0), *(self.clock[rank] for rank in call.ranks))
        end = start + call.seconds
        for link, s in call.links:
            self.served[link] = max(self.served.get(link, 0.0), start) + s
            end = max(end, self.served[link])
        self.free[call.ranks] = end
        self.beside_s = max(self.beside_s, end)
        return end

    def turn(self) -> None:
        """Resets the links: all gathers have been awaited before the backward pass begins."""
        self.served.clear()
        self.beside_s = 0.0


def _add(total: list[float], more: Sequence[tuple[int, float]]) -> None:
    for rank, size in more:
        total[rank] += size


def _inside(space: Space) -> Mapping[int, tuple[list[Exchange], list[Exchange]]]:
    """The collectives between a group's operators, by group, forward and backward, if all ranks take part."""
    out: dict[int, tuple[list[Exchange], list[Exchange]]] = {}
    values: dict[str, str] = {}
    for i in space.program.instructions:
        if not i.is_redistribution:
            continue
        value = values[i.result] = values.get(i.inputs[0], i.inputs[0])
        group = space.grouping.group_of.get(_first_result(space, value))
        if group is None:
            continue
        there = exchange_of(space.program, i)
        back = (
            exchange_of(space.program, i, backward=True) if i.result in space.program.requires_grad else None
        )
        for exchanges, exchange in zip(out.setdefault(group, ([], [])), (there, back)):
            if exchange is not None:
                exchanges.append(exchange)
    return out


def _first_result(space: Space, value: str) -> str:
    return next(r for r in space.program.producers[value].results if r is not None)
