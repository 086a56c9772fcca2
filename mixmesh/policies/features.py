"""A strategy, half made, on a cluster as numbers without units, for any number of groups and devices.

As TAG has it, seconds are over the length of the vector of the groups' seconds, rates over the fastest
link's, and bytes over both: a size is the time that it needs on the best link, against the time of computing.
So nothing changes with the units of time or size. Of TAG's released code two things differ: edges between
groups have their sizes (there they were always zero), and every size is in bytes. Memory is a part of that
of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..placement import SYNCS, Action, Group, Space
from ..ratios import usable_bytes
from .evaluate import Outcome

PARTS = (1.0, 0.5, 0.25, 0.125)  # of the batch, at which times are looked at
# widths of the rows of ``Features``
GROUP, DEVICE, LINK, EDGE, SERVE = len(PARTS) + len(SYNCS) + 6, 8, 2, 1, len(PARTS) + 3
CHOICE, HELD = len(SYNCS) + 2, 3


@dataclass(frozen=True)
class Features:
    """One row per group, device group, edge between groups, ordered pair of device groups, pair of group and
    device group, choice, and pair of choice and device group. Pairs are in the order of a matrix."""

    groups: np.ndarray  # [N, GROUP]
    devices: np.ndarray  # [T, DEVICE]
    edges: np.ndarray  # [2, E]
    edge_sizes: np.ndarray  # [E, EDGE]
    links: np.ndarray  # [T, T, LINK]
    serves: np.ndarray  # [N, T, SERVE]
    asked: int  # the group whose choices these are
    choices: np.ndarray  # [A, CHOICE]
    held: np.ndarray  # [A, T, HELD]


def compressed(x):
    """Sizes of many orders of magnitude, made alike."""
    return np.log1p(32 * x)


class Facts:
    """What does not change while a strategy is made: a space as numbers."""

    def __init__(self, space: Space, optimizer_states: int, headroom: float) -> None:
        self.space, self.ranks = space, space.device_groups
        costs, cluster = space.costs, space.costs.cluster
        firsts = [ranks[0] for ranks in self.ranks]  # of equal devices
        machines = [cluster.machine_of(r) for r in firsts]
        seconds = np.array([[_seconds(g, costs.class_of[r]) for r in firsts] for g in space.groups])
        self.scale_s = float(np.linalg.norm(seconds[:, :, 0].mean(1)))
        self.fastest = max(max(m.link_bytes_per_s, m.nic_bytes_per_s) for m in machines)
        scale_bytes = self.scale_s * self.fastest

        params = np.array([g.param_bytes for g in space.groups], float)
        kept = np.array([g.kept_bytes for g in space.groups], float)
        need = params * (2 + optimizer_states)
        usable = np.array([usable_bytes(costs, r, headroom) for r in firsts], float)
        times = compressed(seconds / self.scale_s)
        sizes = compressed(np.stack([params, kept], 1) / scale_bytes)
        self.groups = np.column_stack([times.mean(1), sizes, compressed(need / usable.min())])
        replicated, alone = need[:, None] / usable, (need + kept)[:, None] / usable
        self.serves = np.concatenate([times, compressed(np.stack([replicated, alone], 2))], 2)
        self.per_group = np.column_stack([self.groups, self.serves.reshape(len(params), -1)])  # one cluster's

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
        self._held: dict[Action, np.ndarray] = {}

    def _link(self, i: int, j: int) -> tuple[float, float]:
        """Rate and latency between two device groups, given by a rank of each, or within one."""
        cluster = self.space.costs.cluster
        rate = cluster.machine_of(i).link_bytes_per_s if i == j else cluster.bandwidth_between(i, j)
        latency = 32 * cluster.latency_between(i, j) / self.scale_s
        return float(compressed(min(rate / self.fastest, 1.0))), min(latency, 1.0)

    def held(self, action: Action) -> np.ndarray:
        """Per device group: the part of the batch, that of one device, and whether the parameter server is
        there."""
        if action not in self._held:
            ratio, root = np.array(action.placed.ratio), action.placed.root
            parts = [ratio[list(ranks)] for ranks in self.ranks]
            self._held[action] = np.array(
                [(p.sum(), p.max(), root in ranks) for p, ranks in zip(parts, self.ranks)], float
            )
        return self._held[action]

    def at(self, chosen: dict[int, Action], asked: int, rest: Action, outcome: Outcome) -> Features:
        """The state in which group ``asked`` is to be placed: ``chosen`` by number of the group, ``rest`` for
        the others. ``outcome`` is what the simulator says of it."""
        count = len(self.space.groups)
        current = [chosen.get(k, rest) for k in range(count)]
        now = np.stack([self.held(a) for a in current])  # [N, T, HELD]
        flags = np.array([(k in chosen, k == asked) for k in range(count)], float)
        sync = np.array([[a.placed.sync == s for s in SYNCS] for a in current], float)
        share = np.array([[max(a.placed.ratio)] for a in current])
        memory = [max(outcome.memory[r] for r in ranks) for ranks in self.ranks]
        busy = [float(np.mean([outcome.busy[r] for r in ranks])) for ranks in self.ranks]
        choices = self.space.actions(asked)
        return Features(
            np.concatenate([self.groups, sync, share, flags], 1),
            np.concatenate([self.devices, np.stack([np.minimum(memory, 4.0), busy], 1)], 1),
            self.edges,
            self.edge_sizes,
            self.links,
            np.concatenate([self.serves, now[:, :, :1]], 2),
            asked,
            np.array(
                [
                    (*(a.placed.sync == s for s in SYNCS), a.shares == "single", max(a.placed.ratio))
                    for a in choices
                ],
                float,
            ),
            np.stack([self.held(a) for a in choices]),
        )


def _seconds(group: Group, device_class: int) -> np.ndarray:
    """Of a group on a device, at every part of the batch."""
    fixed, whole = (sum(pair) for pair in zip(group.forward[device_class], group.backward[device_class]))
    return fixed + whole * np.array(PARTS)
