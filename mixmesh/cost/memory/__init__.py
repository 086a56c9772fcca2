"""Bytes that a program holds on a rank at its peak, by a walk over one step (``walk``).

Memory is linear in the shares at every moment, and the peak is the largest of the moments. Measured on
CPUs it is the resident set of the process, whose allocator holds a little more than is asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from ...lang.ir import Cut, Program, Samples, in_flight, owned_type, support
from ...lang.optimizer_states import ADAM, OptimizerStates
from ...lang.plan_file import Schedule
from ..calls import Kind
from ..exchanges import cut_shares
from ..micro_steps import Part, costed_micro_step, largest_parts, scaled
from ..model import CostModel
from ..sums import Summed, order_of_sums
from .bound import EVERYWHERE, Bound, has_bound
from .repeats import kept_inputs
from .walk import BEFORE, NO_FLIGHT, Flight, Held, Moment, Sizes, Walk, bucket_moments

__all__ = [
    "ALLOWANCE",
    "BEFORE",
    "HEAP_BYTES",
    "Held",
    "Memory",
    "PeakMemory",
    "SMALL_ALLOWANCE",
    "held_by_cut",
    "held_moments",
    "kept_inputs",
    "peak_memory_bytes",
]

# a CPU's heap: what it loses between tensors, and what it keeps of small ones (``runtime.allocator``)
ALLOWANCE = 0.12  # the same run holds 0 to 3 % more from one time to the next
SMALL_ALLOWANCE = 0.6  # more, of the tensors that come and go within the heap
HEAP_BYTES = 48 * 2**20
MAX_PASSES = 32  # over what may be the peak


class Walked:
    """The moments of a program's step that no bucket has a part in, as an array: (moment, cut)."""

    def __init__(
        self,
        program: Program,
        optimizer_states: OptimizerStates,
        *,
        cuda: bool = False,
        held: Held = Held.NOTHING,
        flight: Flight = NO_FLIGHT,
        kinds: Sequence[Kind | None] | None = None,
    ) -> None:
        walk = Walk(program, optimizer_states, cuda=cuda, held=held, flight=flight, kinds=kinds)
        self.cuda = cuda
        self.moments = tuple(walk.moments())
        self.complete = walk.complete
        every = (*self.moments, *self.complete.values())
        # a bucket is whole on the ranks of its parameters
        summed = ((0, 1, p.type.ratio) for p in program.params)
        copied = (p.type.cut for copies in program.copies.values() for p in copies)
        cuts = dict.fromkeys(chain(*(m.held for m in every), summed, copied))
        self.cuts: tuple[Cut, ...] = tuple(cuts if cuda else dict.fromkeys((*cuts, EVERYWHERE)))
        self.sizes = self.array(self.moments)
        self.highest = undominated(self.sizes)

    def array(self, moments: Sequence[Moment]) -> np.ndarray:
        """Unsharded bytes with what a heap loses."""
        sizes = self._rows([m.held for m in moments])
        if not self.cuda:
            small = self._rows([m.small for m in moments])
            sizes = sizes * (1 + ALLOWANCE) + small * SMALL_ALLOWANCE
            sizes[:, self.cuts.index(EVERYWHERE)] += HEAP_BYTES
        return sizes

    def _rows(self, sizes: list[Mapping[Cut, float]]) -> np.ndarray:
        none = (0.0,) * len(self.cuts)
        every = chain.from_iterable(map(size.get, self.cuts, none) for size in sizes)
        return np.fromiter(every, float, len(sizes) * len(none)).reshape(len(sizes), len(none))


def undominated(sizes: np.ndarray) -> np.ndarray:
    """Rows of which one is the peak, whatever the shares: without those of which another has no less of
    anything, but for some that are as cheap to keep as to find."""
    kept = []
    left = _without_slopes(sizes)
    left = left[np.argsort(-left.sum(axis=1), kind="stable")]
    while len(left) and len(kept) < MAX_PASSES:
        kept.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.concatenate([np.array(kept).reshape(len(kept), sizes.shape[1]), left])


def _without_slopes(sizes: np.ndarray) -> np.ndarray:
    """Rows but those of which the next one, or the one before, has no less of anything."""
    rises = (sizes[:-1] <= sizes[1:]).all(axis=1)
    falls = (sizes[1:] <= sizes[:-1]).all(axis=1) & ~rises  # the last of equal ones stays
    kept = np.ones(len(sizes), dtype=bool)
    kept[:-1] &= ~rises
    kept[1:] &= ~falls
    return sizes[kept]


class Memory:
    """The moments of a program's step, made once and read under many ratios. ``walked`` and ``summed``, the
    order of its sums, are those of the program with whatever buckets."""

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
        self.cuts = walked.cuts
        copied = walked.array(copies)
        self.sizes = np.concatenate([walked.sizes, copied])
        self.highest = undominated(np.concatenate([walked.highest, copied])) if copies else walked.highest

    def shares(self, program: Program, part: Part = None) -> np.ndarray:
        """(cut, rank); in a micro-step of this ``part`` of the samples."""
        shares = [
            scaled(cut_shares(cut, program.ratio(cut[2]), program.world_size), cut[2], part)
            for cut in self.cuts
        ]
        return np.array(shares).reshape(len(self.cuts), program.world_size)

    def held_bytes(self, program: Program, part: Part = None) -> np.ndarray:
        """Bytes (moment, rank) under the ratios of ``program``, in a micro-step of this ``part``."""
        return self.sizes @ self.shares(program, part)

    def peaks(self, program: Program, part: Part = None) -> tuple[float, ...]:
        """Bytes per rank."""
        return tuple((self.highest @ self.shares(program, part)).max(axis=0).tolist())

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


def held_moments(
    program: Program, optimizer_states: OptimizerStates, *, cuda: bool = False
) -> tuple[Sizes, ...]:
    """Unsharded bytes by how they are cut, for every moment that may be the peak: one LP row each."""
    return Memory(program, optimizer_states, cuda=cuda).envelope()


class PeakMemory:
    """Peaks under other ratios and buckets of one program, walked once; with ``samples`` in whatever
    micro-steps."""

    def __init__(
        self,
        costs: CostModel,
        optimizer_states: OptimizerStates = ADAM,
        samples: Samples | None = None,
        like: PeakMemory | None = None,
        kinds: Sequence[Kind | None] | None = None,
    ) -> None:
        """``like`` is that of the same instructions on other ranks; ``kinds`` are those of the program's
        computations, of a micro-step's with ``samples``, where they are known already."""
        self.costs, self.optimizer_states, self.samples = costs, optimizer_states, samples
        self._walked: dict[tuple, Walked] = {} if like is None else like._walked
        self._memories: dict[tuple, Memory] = {}
        self._kinds = kinds
        self._summed: tuple[Summed, ...] | None = None
        self._has_bound: bool | None = None
        self._bound = None if like is None else like._bound

    def peaks(self, program: Program, planned: Schedule | None = None) -> tuple[int, ...]:
        """Bytes per rank, with what the process itself takes.

        Among several micro-steps that of the most samples counts, with the gradients of those before it and
        the sums of the last.
        """
        part, step, keys = self._walks(program, planned)
        tensors = {key: self.of(step, *key).peaks(step, part) for key in dict.fromkeys(keys)}
        constant = self._constants(program)
        return tuple(round(constant[rank] + tensors[key][rank]) for rank, key in enumerate(keys))

    def moments(
        self, program: Program, planned: Schedule | None = None
    ) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The bytes that each rank holds at every moment of a step, in the order of the walk, with the event
        of a timeline that each moment belongs to (``BEFORE`` for those before the first step; empty where it
        goes with the moment before it). The largest of them is the peak.

        Buckets of gradients are filled beside the walk: their moments come last. Among several micro-steps
        these are of the one that ``peaks`` counts.
        """
        part, step, keys = self._walks(program, planned)
        held = {key: self.of(step, *key).held_bytes(step, part) for key in dict.fromkeys(keys)}
        constant = self._constants(program)
        return tuple(
            tuple(
                (moment.event, round(constant[rank] + size_bytes))
                for moment, size_bytes in zip(self.of(step, *key).moments, held[key][:, rank].tolist())
            )
            for rank, key in enumerate(keys)
        )

    def _walks(
        self, program: Program, planned: Schedule | None
    ) -> tuple[Part, Program, list[tuple[str, Held, Flight]]]:
        """The part of the samples and the program of the micro-step that counts, and what tells the walks of
        the ranks apart."""
        part = None if planned is None else largest_parts(planned)
        step = program if planned is None else costed_micro_step(program, self.samples)
        flight = NO_FLIGHT if planned is None else flight_of(program, self.samples, planned)
        keys = []
        for rank, device in enumerate(self.costs.cluster.devices):
            several = planned is not None and len(planned.sizes[rank]) > 1
            keys.append((device.kind, Held.of(planned.scatters) if several else Held.NOTHING, flight))
        return part, step, keys

    def _constants(self, program: Program) -> list[float]:
        """Bytes that the process itself takes, per rank."""
        constant, working = self.costs.memory_constant_bytes, set(program.working_ranks)
        return [constant(rank, idle=rank not in working) for rank in range(program.world_size)]

    def at_most(self, program: Program) -> tuple[int, ...] | None:
        """Bytes per rank that a step, at once, surely does not exceed; None where that is not known without
        the walk."""
        if self._has_bound is None:
            self._has_bound = self.samples is None and has_bound(program)
        if not self._has_bound:
            return None
        if self._bound is None:
            self._bound = Bound(program, self.optimizer_states, self._kinds)
        constant, held = self.costs.memory_constant_bytes, self._bound.held_bytes(program)
        lost = [0.0 if d.kind == "gpu" else ALLOWANCE + SMALL_ALLOWANCE for d in self.costs.cluster.devices]
        heap = [0 if d.kind == "gpu" else HEAP_BYTES for d in self.costs.cluster.devices]
        return tuple(
            round(constant(rank) + held[rank] * (1 + lost[rank]) + heap[rank])
            for rank in range(program.world_size)
        )

    def of(
        self, program: Program, kind: str, held: Held = Held.NOTHING, flight: Flight = NO_FLIGHT
    ) -> Memory:
        """The memory of a program on devices of a kind (``cpu``, ``gpu``). Where gradients have owners, their
        buckets are part of the walk."""
        key = (kind, held, flight, program.buckets)
        if key not in self._memories:
            if self._summed is None:
                self._summed = order_of_sums(program)
            has_owners = any(owned_type(program, i) is not None for i in program.params)
            walked = key if has_owners else (kind, held, flight)
            if walked not in self._walked:
                cuda = kind == "gpu"
                self._walked[walked] = Walked(
                    program,
                    self.optimizer_states,
                    cuda=cuda,
                    held=held,
                    flight=flight,
                    kinds=self._kinds,
                )
            self._memories[key] = Memory(
                program, self.optimizer_states, walked=self._walked[walked], summed=self._summed
            )
        return self._memories[key]


def flight_of(program: Program, samples: Samples, planned: Schedule) -> Flight:
    """The micro-steps in flight in every stage beside the one that runs."""
    if not samples.stages:
        return NO_FLIGHT
    others = {}
    count, micro_steps = len(samples.stages), max(map(len, planned.sizes))
    for name, ratio in program.ratios:
        stages = (samples.stage_of(rank) for rank in support(ratio))
        first = min((stage for stage in stages if stage is not None), default=count)
        others[name] = max(in_flight(first, count, micro_steps) - 1, 0)
    return Flight(tuple(others.items()), samples.transfers)


def held_by_cut(program: Program, optimizer_states: OptimizerStates) -> Sizes:
    """As ``held_moments``, of the moment that is the peak of some rank under the program's own ratios."""
    memory = Memory(program, optimizer_states)
    held = memory.held_bytes(program)
    return dict(zip(memory.cuts, memory.sizes[int(held.max(axis=1).argmax())].tolist()))


def peak_memory_bytes(
    program: Program, costs: CostModel, optimizer_states: OptimizerStates = ADAM
) -> tuple[int, ...]:
    """Per rank; a rank that takes part in nothing holds its constant, and the whole model at first."""
    return PeakMemory(costs, optimizer_states).peaks(program)
