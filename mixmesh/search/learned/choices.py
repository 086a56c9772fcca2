"""Seconds and bytes of the choices of a space, as tables, made without judging strategies.

A *kind* is the part of a choice that groups share: a ratio and a way to synchronise. A group without
parameters has fewer kinds; which rank serves parameters differs by group.
"""

from __future__ import annotations

import numpy as np

from ...cost.exchanges import Exchange, sent_between
from ...lang.ir import Ratio, shard_sizes, support
from ...lang.optimizer_states import OptimizerStates
from ..placement import Action, Space
from ..ratios import usable_bytes

# sizes at which collectives are priced, to draw a line through both prices
SMALL_BYTES, LARGE_BYTES = 2**10, 2**26


class Tables:
    """Tables for N groups, A kinds, D ratios and R ranks."""

    def __init__(self, space: Space, optimizer_states: OptimizerStates, headroom: float) -> None:
        self.space, self.costs = space, space.costs
        self.kinds: list[Action] = []
        numbers: dict[tuple[Ratio, str], int] = {}
        self.kinds_of: list[np.ndarray] = []  # for each group, the kind of each of its actions
        for k in range(len(space.groups)):
            for a in space.actions(k):
                if (a.placed.ratio, a.placed.sync) not in numbers:
                    numbers[a.placed.ratio, a.placed.sync] = len(self.kinds)
                    self.kinds.append(a)
            mine = [numbers[a.placed.ratio, a.placed.sync] for a in space.actions(k)]
            self.kinds_of.append(np.array(mine))
        self._numbers = numbers
        ratios = list(dict.fromkeys(a.placed.ratio for a in self.kinds))
        self.ratios = ratios
        self.ratio_of = np.array([ratios.index(a.placed.ratio) for a in self.kinds])  # [A]
        self.shares = np.array([[n / space.batch for n in shard_sizes(space.batch, r)] for r in ratios])
        self.takes_part = np.array(ratios) > 0  # [D, R]
        class_of = np.array(self.costs.class_of)
        lines = np.array([[np.add(f, b) for f, b in zip(g.forward, g.backward)] for g in space.groups])
        lines = lines[:, class_of]  # [N, R, 2]
        busy = lines[:, None, :, 0] + lines[:, None, :, 1] * self.shares
        self.compute_s = np.where(self.takes_part, busy, 0.0)  # [N, D, R]
        params = np.array([g.param_bytes for g in space.groups], float)
        self.sync_s = self._sync_s(params)  # [N, A]
        self.usable = np.array(
            [usable_bytes(self.costs, r, headroom) for r in range(self.costs.cluster.world_size)], float
        )
        self.memory = self._memory(params, optimizer_states.kept) / self.usable  # [N, A, R]
        self._moves: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        used = [
            (v.source, k, v.size_bytes * (1 + v.gradient)) for v in space.grouping.values for k in v.targets
        ]
        self.ends = np.array([(a, b) for a, b, _ in used], int).reshape(-1, 2)
        self.bytes_both_ways = np.array([size for *_, size in used], float)

    def numbers(self, actions) -> np.ndarray:
        """The kind of each of these actions, one per group."""
        return np.array([self._numbers[a.placed.ratio, a.placed.sync] for a in actions])

    def _sync_s(self, params: np.ndarray) -> np.ndarray:
        """Seconds of summing gradients, and of gathering parameters stepped by owners."""
        fixed, slope = [], []
        for a in self.kinds:
            ranks = support(a.placed.ratio)
            names = ("all_reduce",) if a.placed.owners is None else ("reduce_scatter", "all_gather")
            small, large = (
                sum(Exchange(name, size, ranks).seconds(self.costs) for name in names)
                for size in (SMALL_BYTES, LARGE_BYTES)
            )
            slope.append((large - small) / (LARGE_BYTES - SMALL_BYTES))
            fixed.append(small)
        return np.where(params[:, None] > 0, np.array(fixed) + params[:, None] * np.array(slope), 0.0)

    def _memory(self, params: np.ndarray, states: float) -> np.ndarray:
        """Bytes of parameters, gradients and optimizer state, and of activations."""
        owned = np.stack([_owned(a, self.takes_part[d]) for a, d in zip(self.kinds, self.ratio_of)])
        kept = np.array([g.kept_bytes for g in self.space.groups], float)
        fixed = self.takes_part[self.ratio_of] + owned * (1 + states)
        out = params[:, None, None] * fixed + kept[:, None, None] * self.shares[self.ratio_of]
        for k, kinds in enumerate(self.kinds_of):
            for a, kind in zip(self.space.actions(k), kinds):
                if a.placed.root is not None:
                    out[k, kind, a.placed.root] += params[k] * (1 + states)
        return out

    def move_s(self, current: np.ndarray) -> np.ndarray:
        """Seconds of transfers to and from each group at each ratio, forward and backward, [N, D], if all
        other groups keep their ``current`` kinds."""
        at = self.ratio_of[current]
        fixed, slope = (np.zeros((len(self.ratios),) * 2) for _ in range(2))
        for row in set(at.tolist()):
            fixed[row], slope[row] = self._rows(row)
        count = len(self.space.groups)
        size, number = (np.zeros((count, len(self.ratios))) for _ in range(2))
        for a, b in (self.ends.T, self.ends.T[::-1]):
            np.add.at(size, (a, at[b]), self.bytes_both_ways)
            np.add.at(number, (a, at[b]), 1.0)
        return number @ fixed + size @ slope

    def _rows(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of moving a value from one ratio to each other: the fixed part, and the part per byte."""
        if row not in self._moves:
            lines = [self._line(row, column) for column in range(len(self.ratios))]
            self._moves[row] = tuple(np.array(lines).T)
        return self._moves[row]

    def _line(self, row: int, column: int) -> tuple[float, float]:
        src, dst = tuple(self.shares[row]), tuple(self.shares[column])
        if src == dst:
            return 0.0, 0.0
        ranks = tuple(sorted({*support(self.ratios[row]), *support(self.ratios[column])}))
        sent = sent_between(src, dst)
        small, large = (
            Exchange("all_to_all", size, ranks, sent).seconds(self.costs)
            for size in (SMALL_BYTES, LARGE_BYTES)
        )
        return small, (large - small) / (LARGE_BYTES - SMALL_BYTES)


def _owned(action: Action, takes_part: np.ndarray) -> np.ndarray:
    """Each rank's share of gradient and optimizer state, without that of a parameter server."""
    if action.placed.owners is None:
        return takes_part.astype(float)
    if action.placed.sync == "sharded":
        return np.array(action.placed.owners, float)
    return np.zeros(len(takes_part))
