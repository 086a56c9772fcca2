"""A program that a planner proposes, with its simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..base.lazy import lazy
from ..cost.placed import supports
from ..lang.ir import Program, regions, wgrad_of
from ..passes.zero import zero_stage
from ..simulator import MicroBatches, Simulation, Timeline

BASELINES = ("single", "ddp-even", "ddp-proportional", "fsdp-even")


@dataclass(frozen=True)
class Proposal:
    """A program of one planner, with its simulation."""

    planner: str
    program: Program
    timeline: Timeline
    feasible: bool
    simulation: Simulation = field(compare=False, repr=False)
    gap: float | None = None  # share by which the search may have missed the cheapest program
    micro_batches: MicroBatches = None
    # for each pass, in their order
    gained_s: tuple[tuple[str, float], ...] = field(default=(), compare=False)

    @property
    def key(self) -> tuple[bool, float]:
        return (not self.feasible, self.timeline.step_s)

    @lazy
    def kind(self) -> tuple:
        """The traits for which the simulator's error may differ: participating ranks, exchanges, the way and
        the number of gradient sums (as a power of two), rematerialisation, split weight gradients,
        micro-batches."""
        program = self.program
        sums = len({number for number in program.buckets if number is not None})
        return (
            self.planner in BASELINES,
            supports(program),
            frozenset(Counter(i.op for i in program.instructions if i.is_redistribution).items()),
            program.levels is not None,
            bool(program.direct_bytes),
            zero_stage(program),
            sums.bit_length(),
            any(wgrad_of(i) for i in program.instructions),
            any(i.attrs and i.attr("sfb", False) for i in program.instructions),
            len(regions(program)),
            max((m.steps for m in self.micro_batches or ()), default=1),
        )

    @lazy
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Per rank; while plans are compared it is enough to know that they fit."""
        peaks = self.timeline.peak_memory_bytes
        return peaks or self.simulation.peak_memory_bytes(self.program, self.micro_batches)


def ranks_of(program: Program) -> tuple[int, ...]:
    """All ranks that have a share of something; all ranks if there are no shares."""
    sets = supports(program)
    if len(sets) < 2:
        return sets[0] if sets else tuple(range(program.world_size))
    return tuple(sorted({rank for ranks in sets for rank in ranks}))
