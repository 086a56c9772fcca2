"""Divides a device's memory between samples and owned state, for data parallelism in a stage of ZeRO.

At every moment that can be the peak a rank holds

fixed + m * per_sample + z * owned <= usable

with m the samples of its micro-batch and z its share of owned state; its samples of the batch are assumed to
be in proportion to its speed. Rows are not divided, so results are checked by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..lang.ir import Program, Ratio, Scope, make_ratio
from ..step.memory import Held, PeakMemory
from .task import Task


@dataclass(frozen=True)
class _Moments:
    """Bytes held by one rank at every moment. ``usable`` excludes the constant memory of the process."""

    fixed: np.ndarray
    per_sample: np.ndarray
    owned: np.ndarray
    usable: float

    def samples(self, share: float) -> float:
        """The most samples that fit with a share of owned state; below 0 if not even the share fits."""
        return _least(self.usable - self.fixed - share * self.owned, self.per_sample)

    def share(self, samples: int) -> float:
        """The largest share of owned state that fits with ``samples`` samples."""
        return _least(self.usable - self.fixed - samples * self.per_sample, self.owned)


def _least(room: np.ndarray, slope: np.ndarray) -> float:
    if (room[slope == 0] < 0).any():
        return -1.0
    return float((room[slope > 0] / slope[slope > 0]).min(initial=np.inf))


class Room:
    """Memory that a program leaves for samples, without micro-batches or in one of them, which starts with
    gradients ``held``. ``owners`` is the name of the ratio of owned parameters, None in stage 0. A part
    ``spare`` of the memory is left free."""

    def __init__(
        self,
        task: Task,
        program: Program,
        ranks: Sequence[int],
        owners: str | None,
        held: Held,
        spare: float,
        memory: PeakMemory,
    ) -> None:
        self.task, self.ranks, self.owned = task, ranks, owners is not None
        in_micro_steps = any(t.scope is Scope.MICRO_BATCH for t in program.types.values())
        shares, constants = task.shares(tuple(ranks)), memory.constants(program, ranks)
        by_kind: dict[tuple, _Moments] = {}
        self.moments: dict[int, _Moments] = {}
        for r in ranks:
            device = task.costs.cluster.devices[r]
            usable = task.usable_bytes[r] - constants[r]
            usable *= 1 - spare
            key = (device.kind, usable, shares[r])
            if key not in by_kind:
                moments = memory.of(program, device.kind, held)
                terms = np.zeros((3, len(moments.cuts)))
                for n, cut in enumerate(moments.cuts):
                    if not cut.size:
                        terms[0, n] = 1.0
                    elif cut.ratio == owners:
                        terms[2, n] = 1.0
                    elif cut.scope is Scope.MICRO_BATCH or not in_micro_steps:
                        terms[1, n] = 1 / task.batch
                    else:
                        terms[0, n] = shares[r]
                fixed, per_sample, owned = (moments.highest @ term for term in terms)
                by_kind[key] = _Moments(fixed, per_sample, owned, usable)
            self.moments[r] = by_kind[key]

    def largest(self, reserve: float) -> dict[int, int]:
        """The largest micro-batch of every rank if ``reserve`` of the state that it could own with one sample
        is set aside; 0 if not even that fits."""
        out = {}
        for r, moments in self.moments.items():
            share = reserve * min(max(moments.share(1), 0.0), 1.0) if self.owned else 0.0
            # rounding must not cost a sample that fits exactly
            out[r] = int(min(max(moments.samples(share) + 1e-9, 0), self.task.batch))
        return out

    def owners(self, samples: Sequence[int]) -> Ratio | None:
        """Shares of owned state for micro-batches of these samples: in proportion to the optimizer's speed,
        as far as memory allows; None if there is too little memory."""
        able = [r for r in self.ranks if samples[r]]
        most = {r: min(self.moments[r].share(samples[r]), 1.0) for r in able}
        if sum(most.values()) < 1:
            return None
        speed = {r: 1 / max(self.task.costs.optimizer_s(r, 1.0), 1e-30) for r in able}
        shares: dict[int, float] = {}
        while len(shares) < len(able):
            open_ = [r for r in able if r not in shares]
            level = (1 - sum(shares.values())) / sum(speed[r] for r in open_)
            full = [r for r in open_ if level * speed[r] > most[r]]
            shares |= {r: most[r] for r in full} if full else {r: level * speed[r] for r in open_}
        return make_ratio([max(shares.get(r, 0.0), 0.0) for r in range(self.task.world_size)])
