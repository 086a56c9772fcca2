"""A strategy on a cluster as numbers without units, for any number of groups, devices and choices.

As in TAG, seconds are relative to the norm of the vector of the groups' seconds, rates to the fastest link's,
and bytes to both: a size is the time it needs on the best link, relative to the time of computing. So units
of time or size do not matter. Two things differ from TAG's released code: edges between groups have their
sizes (there they were always zero), and every size is in bytes. Memory is relative to the device's.

In addition to TAG's features, a pair of group and choice has the effect of the choice, relative to the
current step: on the seconds of computing, of summing gradients and of transfers, and on memory. So a network
need not learn what a table of costs already gives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ...base.lazy import lazy
from ...lang.optimizer_states import OptimizerStates
from ..evaluate import Outcome
from ..placement import SYNCS, Action, Group, Space
from ..ratios import usable_bytes
from .choices import Tables

PARTS = (1.0, 0.5, 0.25, 0.125)  # shares of the batch for which times are given
# widths of the rows of ``Features``
GROUP, DEVICE, LINK, EDGE, SERVE = len(PARTS) + len(SYNCS) + 6, 8, 2, 1, len(PARTS) + 3
CHOICE, HELD, PAIR = len(SYNCS) + 4, 2, 12
MOST_MEMORY = 4.0  # multiple of the usable memory above which everything is equally bad


@dataclass(frozen=True)
class Features:
    """One row per group, device group, edge between groups, ordered pair of device groups, pair of group and
    device group, kind of choice, pair of kind and device group, and pair of group and possible kind. Pairs
    are in the order of a matrix."""

    groups: np.ndarray  # [N, GROUP]
    devices: np.ndarray  # [T, DEVICE]
    edges: np.ndarray  # [2, E]
    edge_sizes: np.ndarray  # [E, EDGE]
    links: np.ndarray  # [T, T, LINK]
    serves: np.ndarray  # [N, T, SERVE]
    choices: np.ndarray  # [A, CHOICE]
    held: np.ndarray  # [A, T, HELD]
    may: np.ndarray  # [2, P]: group, kind
    pairs: np.ndarray  # [P, PAIR]


def compressed(x):
    """Compresses sizes of many orders of magnitude; the sign of differences is kept."""
    return np.sign(x) * np.log1p(32 * np.abs(x))


class Facts:
    """A space as numbers: the facts that do not change with the strategy."""

    def __init__(self, space: Space, optimizer_states: OptimizerStates, headroom: float) -> None:
        self.space, self.ranks = space, space.device_groups
        costs, cluster = space.costs, space.costs.cluster
        firsts = [ranks[0] for ranks in self.ranks]  # the first of equal devices
        machines = [cluster.machine_of(r) for r in firsts]
        seconds = np.array([[_seconds(g, costs.class_of[r]) for r in firsts] for g in space.groups])
        self.scale_s = float(np.linalg.norm(seconds[:, :, 0].mean(1)))
        self.fastest = max(max(m.link_bytes_per_s, m.nic_bytes_per_s) for m in machines)
        scale_bytes = self.scale_s * self.fastest

        params = np.array([g.param_bytes for g in space.groups], float)
        kept = np.array([g.kept_bytes for g in space.groups], float)
        need = params * (2 + optimizer_states.kept)
        usable = np.array([usable_bytes(costs, r, headroom) for r in firsts], float)
        times = compressed(seconds / self.scale_s)
        sizes = compressed(np.stack([params, kept], 1) / scale_bytes)
        self.groups = np.column_stack([times.mean(1), sizes, compressed(need / usable.min())])
        replicated, alone = need[:, None] / usable, (need + kept)[:, None] / usable
        self.serves = np.concatenate([times, compressed(np.stack([replicated, alone], 2))], 2)
        # the figures for one cluster
        self.per_group = np.column_stack([self.groups, self.serves.reshape(len(params), -1)])

        counts = np.array([len(ranks) for ranks in self.ranks], float)
        share = np.array([sum(space.proportional[r] for r in ranks) for ranks in self.ranks])
        self.devices = np.column_stack(
            [
                counts / cluster.world_size,
                share,
                share / counts * cluster.world_size,
                compressed(np.array([m.link_bytes_per_s for m in machines]) / self.fastest),
                compressed(np.array([m.nic_bytes_per_s for m in machines]) / self.fastest),
                compressed(usable / (need.sum() + kept.sum())),
            ]
        )
        self.links = np.array([[self._link(i, j) for j in firsts] for i in firsts])
        edges = space.grouping.edges
        self.edges = np.array([(e.source, e.target) for e in edges], int).reshape(-1, 2).T
        both_ways = np.array([[e.size_bytes * (1 + e.gradient)] for e in edges], float).reshape(-1, 1)
        self.edge_sizes = compressed(both_ways / scale_bytes)
        self._tables_of = lambda: Tables(space, optimizer_states, headroom)

    @lazy
    def tables(self) -> Tables:
        return self._tables_of()

    @lazy
    def held(self) -> np.ndarray:
        """Per kind and device group the part of the batch, and the most of one device: [A, T, HELD]."""
        shares = np.array([a.placed.ratio for a in self.tables.kinds])
        parts = [shares[:, list(ranks)] for ranks in self.ranks]
        return np.stack([np.stack([p.sum(1), p.max(1)], 1) for p in parts], 1)

    @lazy
    def choices(self) -> np.ndarray:
        """Per kind, how gradients are summed, the number of devices and their speed: [A, CHOICE]."""
        kinds, speed = self.tables.kinds, np.array(self.space.proportional)
        shares = np.array([a.placed.ratio for a in kinds])
        sync = [[a.placed.sync == s for s in SYNCS] + [a.shares == "single"] for a in kinds]
        used = shares > 0
        return np.column_stack([np.array(sync, float), shares.max(1), used.mean(1), used @ speed])

    @lazy
    def may(self) -> np.ndarray:
        """Pairs of group and kind: [2, P]."""
        groups = [np.full(len(mine), k) for k, mine in enumerate(self.tables.kinds_of)]
        return np.stack([np.concatenate(groups), np.concatenate(self.tables.kinds_of)])

    def _link(self, i: int, j: int) -> tuple[float, float]:
        """Rate and latency between two device groups, given by a rank of each, or within one."""
        cluster = self.space.costs.cluster
        rate = cluster.machine_of(i).link_bytes_per_s if i == j else cluster.bandwidth_between(i, j)
        latency = 32 * cluster.latency_between(i, j) / self.scale_s
        return float(compressed(min(rate / self.fastest, 1.0))), min(latency, 1.0)

    def at(
        self, decided: Collection[int], current: Sequence[Action], first: int, outcome: Outcome
    ) -> Features:
        """The features of a strategy, ``current`` by group. Choices for the groups in ``decided`` are not
        needed, ``first`` is the group whose choice others copy, and ``outcome`` is the simulator's judgement
        of the strategy."""
        tables = self.tables
        kinds = tables.numbers(current)
        flags = np.array([(k in decided, k == first) for k in range(len(current))], float)
        sync = np.array([[a.placed.sync == s for s in SYNCS] for a in current], float)
        memory = [max(outcome.memory[r] for r in ranks) for ranks in self.ranks]
        busy = [float(np.mean([outcome.busy[r] for r in ranks])) for ranks in self.ranks]
        now = self.held[kinds]  # [N, T, HELD]
        return Features(
            np.concatenate([self.groups, sync, self.choices[kinds][:, -3:-2], flags], 1),
            np.concatenate([self.devices, np.stack([np.minimum(memory, MOST_MEMORY), busy], 1)], 1),
            self.edges,
            self.edge_sizes,
            self.links,
            np.concatenate([self.serves, now[:, :, :1]], 2),
            self.choices,
            self.held,
            self.may,
            self._pairs(kinds, first, outcome),
        )

    def _pairs(self, kinds: np.ndarray, first: int, outcome: Outcome) -> np.ndarray:
        """The features of each choice of each group, with the changes it would make relative to the step."""
        tables, (k, kind), each = self.tables, self.may, np.arange(len(kinds))
        ratio, here = tables.ratio_of, tables.ratio_of[kinds]
        compute, memory = tables.compute_s, tables.memory
        load = compute[each, here].sum(0)  # [R]
        loads = (load - compute[each, here][:, None] + compute).max(2)  # [N, D]: of the busiest rank
        held = np.array(outcome.memory)
        peaks = (held - memory[each, kinds][:, None] + memory).max(2)  # [N, A]
        slowest, move = compute.max(2), tables.move_s(kinds)
        at, step_s = ratio[kind], outcome.step_s
        seconds = np.stack(
            [
                slowest[k, at],
                slowest[k, at] - slowest[each, here][k],
                loads[k, at],
                loads[k, at] - load.max(),
                tables.sync_s[k, kind],
                tables.sync_s[k, kind] - tables.sync_s[each, kinds][k],
                move[k, at],
                move[k, at] - move[each, here][k],
            ],
            1,
        )
        peak = np.minimum(peaks[k, kind], MOST_MEMORY)
        others = np.stack(
            [peak, compressed(peak - min(held.max(), MOST_MEMORY)), kind == kinds[k], at == here[first]], 1
        )
        return np.concatenate([compressed(seconds / step_s), others], 1)


def _seconds(group: Group, device_class: int) -> np.ndarray:
    """Seconds of a group on a device, at every part of the batch."""
    fixed, whole = (sum(pair) for pair in zip(group.forward[device_class], group.backward[device_class]))
    return fixed + whole * np.array(PARTS)
