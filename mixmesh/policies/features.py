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

from ..placement import SYNCS, Action, Space
from ..ratios import usable_bytes
from .evaluate import Outcome

PARTS = (1.0, 0.5, 0.25, 0.125)  # of the batch, at which times are looked at
GROUP, DEVICE, LINK, EDGE, SERVE = 4 + 3 + 3 + 1 + 2, 8, 2, 1, 4 + 3
CHOICE, HELD = len(SYNCS) + 2, 3  # of a choice; of a choice on a device group


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


def compressed(x: np.ndarray) -> np.ndarray:
    """Sizes of many orders of magnitude, made alike."""
    return np.log1p(32 * x)


class Facts:
    """What does not change while a strategy is made: a space as numbers."""

    def __init__(self, space: Space, optimizer_states: int, headroom: float) -> None:
        self.space = space
        costs, cluster = space.costs, space.costs.cluster
        self.ranks = space.device_groups
        self.class_of = [costs.class_of[ranks[0]] for ranks in self.ranks]
        machines = [cluster.machines[cluster.machine_index_of(ranks[0])] for ranks in self.ranks]
        parts = np.array(PARTS)
        # [N, T, parts]
        seconds = np.array(
            [
                [_seconds(g.forward[c], parts) + _seconds(g.backward[c], parts) for c in self.class_of]
                for g in space.groups
            ]
        )
        scale_s = float(np.linalg.norm(seconds[:, :, 0].mean(1)))
        fastest = max(max(m.link_bytes_per_s, m.nic_bytes_per_s) for m in machines)
        scale_bytes = scale_s * fastest
        usable = np.array([usable_bytes(costs, ranks[0], headroom) for ranks in self.ranks], float)
        params = np.array([g.param_bytes for g in space.groups], float)
        kept = np.array([g.kept_bytes for g in space.groups], float)
        self.share = np.array([sum(space.proportional[r] for r in ranks) for ranks in self.ranks])
        counts = np.array([len(ranks) for ranks in self.ranks], float)

        times = compressed(seconds / scale_s)
        sizes = compressed(np.stack([params, kept], 1) / scale_bytes)
        need = params * (2 + optimizer_states)
        self.groups = np.concatenate(
            [times.mean(1), sizes, compressed(need / usable.min())[:, None]], 1
        )  # [N, 7]
        self.devices = np.stack(
            [
                counts / cluster.world_size,
                self.share,
                self.share / counts * cluster.world_size,
                compressed(np.array([m.link_bytes_per_s for m in machines]) / fastest),
                compressed(np.array([m.nic_bytes_per_s for m in machines]) / fastest),
                compressed(usable / (need.sum() + kept.sum())),
            ],
            1,
        )
        self.edges = np.array([(e.source, e.target) for e in space.grouping.edges], int).reshape(-1, 2).T
        bytes_ = [e.size_bytes * (1 + e.gradient) for e in space.grouping.edges]
        self.edge_sizes = compressed(np.array(bytes_, float)[:, None] / scale_bytes)
        first = [ranks[0] for ranks in self.ranks]
        self.links = np.array(
            [
                [
                    (
                        (machines[a].link_bytes_per_s if a == b else cluster.bandwidth_between(i, j))
                        / fastest,
                        32 * cluster.latency_between(i, j) / scale_s,
                    )
                    for b, j in enumerate(first)
                ]
                for a, i in enumerate(first)
            ]
        )
        self.links = np.minimum(self.links, 1.0)
        self.links[:, :, 0] = compressed(self.links[:, :, 0])
        memory = np.stack(
            [need[:, None] / usable, (need[:, None] + kept[:, None]) / usable], 2
        )  # replicated; on one device
        self.serves = np.concatenate([times, compressed(memory)], 2)  # [N, T, 6]
        self.per_group = np.concatenate(
            [self.groups, self.serves.reshape(len(params), -1)], 1
        )  # one cluster's
        self._held: dict[Action, np.ndarray] = {}

    def held(self, action: Action) -> np.ndarray:
        """Per device group: the part of the batch, that of one device against a proportional share, and
        whether the parameter server is there."""
        if action not in self._held:
            ratio, root = np.array(action.placed.ratio), action.placed.root
            rows = []
            for ranks in self.ranks:
                part = ratio[list(ranks)].sum()
                rows.append((part, ratio[list(ranks)].max(), float(root in ranks)))
            self._held[action] = np.array(rows)
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


def _seconds(line: tuple[float, float], parts: np.ndarray) -> np.ndarray:
    return line[0] + line[1] * parts
