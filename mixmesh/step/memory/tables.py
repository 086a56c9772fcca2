"""The moments of a step as arrays: made once, and read under many ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from ...base.heap import KEPT_BYTES
from ...cost.exchanges import cut_shares
from ...cost.gpu_memory import POOL_BYTES, allocator_loss
from ...cost.micro_steps import Part, scaled
from ...cost.outline import Outline
from ...cost.sums import Summed, order_of_sums
from ...lang.ir import EVERYWHERE, Cut, Program
from ...lang.optimizer_states import OptimizerStates
from ..step import Step, step_of
from .buckets import bucket_moments
from .flight import NO_FLIGHT, Flight
from .fold import liveness
from .moments import BEFORE, Moment, Sizes
from .state import Held, Setting

# a CPU's heap: its loss between tensors, and small tensors that it keeps (``runtime.allocator``)
ALLOWANCE = 0.05  # repeated runs differ by 0 to 3 %
SMALL_ALLOWANCE = 0.9  # larger for tensors that come and go within the heap: 0.2 to 1.1 were seen
HEAP_BYTES = 48 * 2**20 + KEPT_BYTES
ROOMY_ALLOWANCE = 0.6  # for larger ones where the heap keeps everything: 0 to 0.6 were seen
MAX_PASSES = 32  # limit on the passes over candidates for the peak


class Walked:
    """The moments of a program's step without its buckets, as an array: (moment, cut). ``step`` is that of
    the program, with any buckets."""

    def __init__(
        self,
        program: Program,
        optimizer_states: OptimizerStates,
        *,
        cuda: bool = False,
        held: Held = Held.NOTHING,
        flight: Flight = NO_FLIGHT,
        step: Step | None = None,
    ) -> None:
        self.step = step_of(Outline(program)) if step is None else step
        setting = Setting.of(program, self.step, optimizer_states, cuda=cuda, held=held, flight=flight)
        lives = liveness(setting)
        self.cuda = cuda
        self.moments, self.complete = lives.moments, lives.complete
        every = (*self.moments, *self.complete.values())
        # a bucket is whole on the ranks of its parameters
        summed = (p.type.cut.whole for p in program.params)
        copied = (p.type.cut for copies in program.copies.values() for p in copies)
        cuts = dict.fromkeys(chain(*(m.held for m in every), summed, copied))
        self.cuts: tuple[Cut, ...] = tuple(dict.fromkeys((*cuts, EVERYWHERE)))
        self.sizes = self.array(self.moments)
        self.highest = undominated(self.sizes)

    def array(self, moments: Sequence[Moment]) -> np.ndarray:
        """Unsharded bytes, including the losses of a heap or a GPU's allocator."""
        sizes = self._rows([m.held for m in moments])
        if self.cuda:
            sizes = sizes * (1 + allocator_loss())
        else:
            small = self._rows([m.small for m in moments])
            sizes = sizes * (1 + ALLOWANCE) + small * SMALL_ALLOWANCE
        sizes[:, self.cuts.index(EVERYWHERE)] += POOL_BYTES if self.cuda else HEAP_BYTES
        return sizes

    def kept_by_heap(self, moments: Sequence[Moment]) -> np.ndarray:
        """Unsharded bytes that a CPU's heap holds besides, if it keeps everything (``runtime.allocator``)."""
        first = next((m for m in moments if m.event != BEFORE), moments[0])
        more = self._rows([m.held for m in moments]) - self._rows([m.small for m in moments])
        in_step = np.array([[m.event != BEFORE] for m in moments])
        return ROOMY_ALLOWANCE * in_step * np.maximum(more - self._rows([first.held]), 0.0)

    def _rows(self, sizes: Sequence[Mapping[Cut, float]]) -> np.ndarray:
        none = (0.0,) * len(self.cuts)
        every = chain.from_iterable(map(size.get, self.cuts, none) for size in sizes)
        return np.fromiter(every, float, len(sizes) * len(none)).reshape(len(sizes), len(none))


def undominated(sizes: np.ndarray) -> np.ndarray:
    """The rows that can be the peak for some shares. Rows that nowhere exceed another row are dropped, except
    for some that cost as much to find as to keep."""
    kept: list[np.ndarray] = []
    left = _without_slopes(sizes)
    left = left[np.argsort(-left.sum(axis=1), kind="stable")]
    while len(left) and len(kept) < MAX_PASSES:
        kept.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.concatenate([np.array(kept).reshape(len(kept), sizes.shape[1]), left])


def _without_slopes(sizes: np.ndarray) -> np.ndarray:
    """The rows without those that nowhere exceed the next or the previous row."""
    rises = (sizes[:-1] <= sizes[1:]).all(axis=1)
    falls = (sizes[1:] <= sizes[:-1]).all(axis=1) & ~rises  # the last of equal rows stays
    kept = np.ones(len(sizes), dtype=bool)
    kept[:-1] &= ~rises
    kept[1:] &= ~falls
    return sizes[kept]


class Memory:
    """The moments of a program's step, with those of its buckets. ``walked``, and ``summed``, the order of
    its sums, are those of the program with any buckets."""

    def __init__(
        self,
        program: Program,
        optimizer_states: OptimizerStates,
        *,
        cuda: bool = False,
        walked: Walked | None = None,
        summed: tuple[Summed, ...] | None = None,
    ) -> None:
        walked = walked or Walked(program, optimizer_states, cuda=cuda)
        summed = order_of_sums(program) if summed is None else summed
        copies = tuple(bucket_moments(program, walked.complete, summed))
        self.moments = walked.moments + copies
        self._walked = walked
        self.cuts = walked.cuts
        copied = walked.array(copies)
        self.sizes = np.concatenate([walked.sizes, copied])
        self.highest = undominated(np.concatenate([walked.highest, copied])) if copies else walked.highest

    def shares(self, program: Program, part: Part = None) -> np.ndarray:
        """The shares as an array (cut, rank); in a micro-batch, those for this ``part`` of the samples."""
        shares = [
            scaled(cut_shares(cut, program.ratio(cut.ratio), program.world_size), cut, part)
            for cut in self.cuts
        ]
        return np.array(shares).reshape(len(self.cuts), program.world_size)

    def held_bytes(self, program: Program, part: Part = None) -> np.ndarray:
        """Bytes (moment, rank) under the ratios of ``program``, in a micro-batch of this ``part``."""
        return self.sizes @ self.shares(program, part)

    def peaks(self, program: Program, part: Part = None, *, roomy: bool = False) -> tuple[float, ...]:
        """Bytes per rank; ``roomy`` where a CPU's heap keeps everything."""
        highest = self.highest
        if roomy and not self._walked.cuda:
            highest = self.sizes + self._walked.kept_by_heap(self.moments)
        return tuple((highest @ self.shares(program, part)).max(axis=0).tolist())

    def envelope(self) -> tuple[Sizes, ...]:
        """The moments that are the peak for some share from 0 to 1 of all that is cut."""
        cut = np.array([bool(cut.size) for cut in self.cuts], dtype=bool)
        fixed, slope = self.sizes[:, ~cut].sum(axis=1), self.sizes[:, cut].sum(axis=1)
        highest, share = [], 0.0
        at = int(np.lexsort((slope, fixed))[-1])
        while True:
            highest.append(at)
            steeper = np.flatnonzero(slope > slope[at])
            if not len(steeper):
                break
            meets = (fixed[at] - fixed[steeper]) / (slope[steeper] - slope[at])
            share = meets.min()
            if share >= 1:
                break
            first = steeper[meets == share]
            at = int(first[slope[first].argmax()])
        return tuple(dict(zip(self.cuts, self.sizes[n].tolist())) for n in highest)
