"""Bytes that a program holds on a rank at its peak, by a walk over one step (``walk``).

Memory is linear in the shares at every moment, and the peak is the largest of the moments. Measured on
CPUs it is the resident set of the process, whose allocator holds a little more than is asked of it.
"""

from __future__ import annotations

import numpy as np

from ...ir import Program
from ..model import CostModel
from ..placed import Cut, cut_shares
from .walk import Moment, Sizes, Walk

__all__ = [
    "ALLOWANCE",
    "HEAP_BYTES",
    "Memory",
    "PeakMemory",
    "held_by_cut",
    "held_moments",
    "peak_memory_bytes",
]

# a CPU's heap: what it loses between tensors, and what it keeps of small ones (``runtime.allocator``)
ALLOWANCE = 0.06
HEAP_BYTES = 32 * 2**20


class Memory:
    """The moments of a program's step, made once and read under many ratios."""

    def __init__(self, program: Program, optimizer_states: int, *, cuda: bool = False) -> None:
        self.moments = tuple(Walk(program, optimizer_states, cuda=cuda).moments())
        self.cuts: tuple[Cut, ...] = tuple(dict.fromkeys(cut for m in self.moments for cut in m.held))
        self.sizes = np.array([[m.held.get(cut, 0.0) for cut in self.cuts] for m in self.moments])
        if not cuda:
            everywhere = (0, 1, None)
            if everywhere not in self.cuts:
                self.cuts += (everywhere,)
                self.sizes = np.pad(self.sizes, ((0, 0), (0, 1)))
            self.sizes *= 1 + ALLOWANCE
            self.sizes[:, self.cuts.index(everywhere)] += HEAP_BYTES

    def held_bytes(self, program: Program) -> np.ndarray:
        """Bytes (moment, rank) under the ratios of ``program``."""
        shares = [cut_shares(cut, program.ratio(cut[2]), program.world_size) for cut in self.cuts]
        return self.sizes @ np.array(shares).reshape(len(self.cuts), program.world_size)

    def peaks(self, program: Program) -> tuple[float, ...]:
        """Bytes per rank."""
        return tuple(self.held_bytes(program).max(axis=0).tolist())

    def peak_moment(self, program: Program, rank: int) -> Moment:
        """When ``rank`` holds most, and what."""
        return self.moments[int(self.held_bytes(program)[:, rank].argmax())]

    def envelope(self) -> tuple[Sizes, ...]:
        """The moments that are the peak for some share from 0 to 1 of all that is cut."""
        cut = np.array([bool(size) for size, _, _ in self.cuts], dtype=bool)
        fixed, slope = self.sizes[:, ~cut].sum(axis=1), self.sizes[:, cut].sum(axis=1)
        found, share = [], 0.0
        at = int(np.lexsort((slope, fixed))[-1])
        while True:
            found.append(at)
            steeper = np.flatnonzero(slope > slope[at])
            if not len(steeper):
                break
            meets = (fixed[at] - fixed[steeper]) / (slope[steeper] - slope[at])
            share = meets.min()
            if share >= 1:
                break
            first = steeper[meets == share]
            at = int(first[slope[first].argmax()])
        return tuple(dict(zip(self.cuts, self.sizes[n].tolist())) for n in found)


def held_moments(program: Program, optimizer_states: int, *, cuda: bool = False) -> tuple[Sizes, ...]:
    """Bytes in whole by how they are cut, for every moment that may be the peak: one LP row each."""
    return Memory(program, optimizer_states, cuda=cuda).envelope()


class PeakMemory:
    """Peaks under other ratios and buckets of one program, walked once for every set of buckets."""

    def __init__(self, costs: CostModel, optimizer_states: int = 2) -> None:
        self.costs, self.optimizer_states = costs, optimizer_states
        self._memories: dict[tuple, Memory] = {}

    def peaks(self, program: Program) -> tuple[int, ...]:
        """Bytes per rank, with what the process itself takes."""
        kinds = [device.kind for device in self.costs.cluster.devices]
        tensors = {kind: self._memory(program, kind).peaks(program) for kind in dict.fromkeys(kinds)}
        constant = self.costs.memory_constant_bytes
        return tuple(
            round(constant(rank, idle=is_idle(program, rank)) + tensors[kind][rank])
            for rank, kind in enumerate(kinds)
        )

    def _memory(self, program: Program, kind: str) -> Memory:
        key = (kind, tuple(i.attr("bucket") for i in program.params))
        if key not in self._memories:
            self._memories[key] = Memory(program, self.optimizer_states, cuda=kind == "gpu")
        return self._memories[key]


def is_idle(program: Program, rank: int) -> bool:
    """Whether a rank takes part in nothing."""
    return bool(program.ratios) and all(ratio[rank] == 0 for _, ratio in program.ratios)


def held_by_cut(program: Program, optimizer_states: int) -> Sizes:
    """As ``held_moments``, of the moment that is the peak of some rank under the program's own ratios."""
    memory = Memory(program, optimizer_states)
    held = memory.held_bytes(program)
    return dict(zip(memory.cuts, memory.sizes[int(held.max(axis=1).argmax())].tolist()))


def peak_memory_bytes(program: Program, costs: CostModel, optimizer_states: int = 2) -> tuple[int, ...]:
    """Per rank; a rank that takes part in nothing holds its constant, and the whole model at first."""
    return PeakMemory(costs, optimizer_states).peaks(program)
