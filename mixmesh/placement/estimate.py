"""What a strategy's step takes, group by group: for searches that ask thousands of times.

The order of events is the simulator's, coarser. Groups run in their order on the ranks that they have, back
in the reverse; what goes between groups of different ratios stops the ranks of both until it is there;
gradients are summed beside the backward pass, group by group, on links that are shared. Memory is what stays:
parameters, gradients, optimizer state, what the backward pass needs. The simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..cost.placed import Exchange, sent_between
from ..ir import Ratio, shard_sizes, support
from .lower import Placed
from .strategy import Action, Space

SYNC_COLLECTIVES = {
    "allreduce": ("all_reduce",),
    "sharded": ("reduce_scatter", "all_gather"),
    "ps": ("reduce", "broadcast"),
}


@dataclass(frozen=True)
class Estimate:
    """As a ``Timeline``: of the step, and per rank. ``done_s``: when each group's forward pass ends."""

    step_s: float
    peak_memory_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    done_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Cost:
    """A group as it is placed: seconds by rank that takes part, bytes by rank that holds them."""

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]
    optimizer: tuple[tuple[int, float], ...]
    held: tuple[tuple[int, float], ...]
    sum_s: float
    links: tuple[tuple[object, float], ...]  # seconds for which its sum occupies each
    ranks: tuple[int, ...]


class Estimator:
    """Estimates of one space. ``optimizer_states`` is tensors per parameter (Adam: 2)."""

    def __init__(self, space: Space, optimizer_states: int = 2) -> None:
        self.space, self.costs, self.optimizer_states = space, space.costs, optimizer_states
        self.world_size = space.program.world_size
        self.batch = space.batch
        self.constant = [self.costs.memory_constant_bytes(r) for r in range(self.world_size)]
        self._costs: dict[tuple[int, Placed], _Cost] = {}
        self._moves: dict[tuple[Ratio, Ratio, int], tuple[float, tuple[int, ...]]] = {}
        self._shares = lru_cache(self._share_of)
        # values by their source, and by the groups that use them
        self.used: list[list[int]] = [[] for _ in space.groups]
        for n, value in enumerate(space.grouping.values):
            for k in value.targets:
                self.used[k].append(n)

    def __call__(self, actions: Sequence[Action | Placed]) -> Estimate:
        placed = [a.placed if isinstance(a, Action) else a for a in actions]
        groups = [self._cost(k, p) for k, p in enumerate(placed)]
        values = self.space.grouping.values
        clock, busy, held = [[0.0] * self.world_size for _ in range(3)]
        for cost in groups:
            for rank, seconds in cost.optimizer:
                clock[rank] += seconds
            for rank, size in cost.held:
                held[rank] += size
        busy = list(clock)
        moved: set[tuple[int, Ratio]] = set()  # values that are where they are needed
        moves: list[list[tuple[Ratio, Ratio, int]]] = [[] for _ in groups]  # back, by group
        done = []
        for k, cost in enumerate(groups):
            ratio = placed[k].ratio
            for n in self.used[k]:
                value = values[n]
                source = placed[value.source].ratio
                if ratio != source and (n, ratio) not in moved:
                    moved.add((n, ratio))
                    self._meet(clock, source, ratio, value.size_bytes)
                    if value.gradient:
                        moves[k].append((ratio, source, value.size_bytes))
                    for rank in support(ratio):
                        held[rank] += value.size_bytes * self._shares(ratio)[rank]
            for rank, seconds in cost.forward:
                clock[rank] += seconds
                busy[rank] += seconds
            done.append(max(clock[rank] for rank in cost.ranks))
        served: dict[object, float] = {}
        free: dict[tuple[int, ...], float] = {}
        end = 0.0
        for k in range(len(groups) - 1, -1, -1):
            cost = groups[k]
            for rank, seconds in cost.backward:
                clock[rank] += seconds
                busy[rank] += seconds
            for move in moves[k]:
                self._meet(clock, *move)
            if cost.sum_s:
                start = max(free.get(cost.ranks, 0.0), *(clock[rank] for rank in cost.ranks))
                ends = start + cost.sum_s
                for link, seconds in cost.links:
                    served[link] = max(served.get(link, 0.0), start) + seconds
                    ends = max(ends, served[link])
                free[cost.ranks] = ends
                end = max(end, ends)
        peaks = tuple(round(size) + constant for size, constant in zip(held, self.constant))
        return Estimate(max(end, *clock), peaks, tuple(busy), tuple(done))

    def held_bytes(self, k: int, placed: Placed) -> tuple[tuple[int, float], ...]:
        """What a group holds, by rank that takes part."""
        return self._cost(k, placed).held

    def _meet(self, clock: list[float], source: Ratio, target: Ratio, size_bytes: int) -> None:
        key = (source, target, size_bytes)
        if key not in self._moves:
            self._moves[key] = self._move(*key)
        seconds, ranks = self._moves[key]
        if ranks:
            there = max(clock[rank] for rank in ranks) + seconds
            for rank in ranks:
                clock[rank] = there

    def _move(self, source: Ratio, target: Ratio, size_bytes: int) -> tuple[float, tuple[int, ...]]:
        src, dst = self._shares(source), self._shares(target)
        if src == dst:
            return 0.0, ()
        ranks = tuple(sorted({*support(source), *support(target)}))
        sent = sent_between(src, dst)
        return Exchange("all_to_all", size_bytes, ranks, sent).seconds(self.costs), ranks

    def _share_of(self, ratio: Ratio) -> tuple[float, ...]:
        return tuple(n / self.batch for n in shard_sizes(self.batch, ratio))

    def _cost(self, k: int, placed: Placed) -> _Cost:
        key = (k, placed)
        if key not in self._costs:
            self._costs[key] = self._make(k, placed)
        return self._costs[key]

    def _make(self, k: int, placed: Placed) -> _Cost:
        group, ranks = self.space.groups[k], support(placed.ratio)
        shares, class_of = self._shares(placed.ratio), self.costs.class_of
        owners = placed.owners
        owned = {r: group.param_bytes * (1.0 if owners is None else owners[r]) for r in ranks}

        def seconds(lines) -> tuple[tuple[int, float], ...]:
            return tuple((r, lines[class_of[r]][0] + lines[class_of[r]][1] * shares[r]) for r in ranks)

        sums = [
            Exchange(name, group.param_bytes, ranks)
            for name in (SYNC_COLLECTIVES[placed.sync] if group.param_bytes and len(ranks) > 1 else ())
        ]
        links: dict[object, float] = {}
        for exchange in sums:
            for link, s in exchange.link_s_per_byte(self.costs.cluster).items():
                links[link] = links.get(link, 0.0) + s * exchange.size_bytes
        held = [
            (r, group.param_bytes + owned[r] * self.optimizer_states + group.kept_bytes * shares[r])
            for r in ranks
        ]
        gradients = [(r, group.param_bytes if owners is None else owned[r]) for r in ranks]
        return _Cost(
            seconds(group.forward),
            seconds(group.backward),
            tuple((r, self.costs.optimizer_s(r, owned[r])) for r in ranks),
            tuple((r, size + more) for (r, size), (_, more) in zip(held, gradients)),
            sum(exchange.seconds(self.costs) for exchange in sums),
            tuple(links.items()),
            ranks,
        )
