"""The peaks of ranks, for any ratios and buckets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...cost.communicators import Communicator
from ...cost.gpu_memory import POOL_BYTES, allocator_loss
from ...cost.meetings import communicators
from ...cost.micro_steps import Part, costed_micro_step, largest_parts
from ...cost.model import CostModel
from ...cost.outline import Outline
from ...cost.sums import Summed, order_of_sums
from ...lang.ir import Program, Samples, owned_type, support
from ...lang.optimizer_states import ADAM, OptimizerStates
from ...lang.plan_file import Schedule
from ..step import Step, step_of
from .bound import Bound, has_bound
from .flight import NO_FLIGHT, Flight, flight_of
from .moments import Sizes
from .state import Held
from .tables import ALLOWANCE, HEAP_BYTES, SMALL_ALLOWANCE, Memory, Walked


class PeakMemory:
    """The peaks of one program under many ratios and buckets, all from one fold; with ``samples``, in any
    micro-batches."""

    def __init__(
        self,
        costs: CostModel,
        optimizer_states: OptimizerStates = ADAM,
        samples: Samples | None = None,
        step: Step | None = None,
    ) -> None:
        """``step`` is that of the program, with ``samples`` of its micro-batch, if it is already known."""
        self.costs, self.optimizer_states, self.samples = costs, optimizer_states, samples
        self._walked: dict[tuple, Walked] = {}
        self._memories: dict[tuple, Memory] = {}
        self._meetings: dict[tuple, tuple[Communicator, ...]] = {}
        self._step = step
        self._summed: tuple[Summed, ...] | None = step.summed if step and samples is None else None
        self._has_bound: bool | None = None
        self._bound: Bound | None = None

    def on(self, samples: Samples | None, step: Step) -> PeakMemory:
        """The peaks of the same instructions on other ranks, with the same fold."""
        other = PeakMemory(self.costs, self.optimizer_states, samples, step)
        other._walked, other._bound = self._walked, self._bound
        return other

    def peaks(
        self, program: Program, planned: Schedule | None = None, *, roomy: bool = False
    ) -> tuple[int, ...]:
        """Bytes per rank, including the process itself; ``roomy`` on devices whose heap keeps everything.

        With several micro-batches the one with the most samples counts, with the gradients of those before it
        and the sums of the last one.
        """
        part, one, keys = self._walks(program, planned)
        tensors = {key: self.of(one, *key).peaks(one, part, roomy=roomy) for key in dict.fromkeys(keys)}
        constant = self.constants(program)
        peaks = tuple(round(constant[rank] + tensors[key][rank]) for rank, key in enumerate(keys))
        if not roomy or not self.optimizer_states.earlier:
            return peaks
        # the first pass of a step begins without gradients, which then come and go
        alone = PeakMemory(self.costs, self.optimizer_states._replace(earlier=0), self.samples)
        return tuple(map(max, peaks, alone.peaks(program, planned, roomy=True)))

    def moments(
        self, program: Program, planned: Schedule | None = None
    ) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The bytes that each rank holds at every moment of a step, in order, each with the timeline's event
        to which it belongs (``BEFORE`` for moments before the first step; empty if a moment belongs to the
        one before it). The largest of them is the peak.

        Moments of buckets come last. With several micro-batches these are moments of the one that ``peaks``
        counts.
        """
        part, one, keys = self._walks(program, planned)
        held = {key: self.of(one, *key).held_bytes(one, part) for key in dict.fromkeys(keys)}
        constant = self.constants(program)
        return tuple(
            tuple(
                (moment.event, round(constant[rank] + size_bytes))
                for moment, size_bytes in zip(self.of(one, *key).moments, held[key][:, rank].tolist())
            )
            for rank, key in enumerate(keys)
        )

    def _walks(
        self, program: Program, planned: Schedule | None
    ) -> tuple[Part, Program, Sequence[tuple[str, Held, Flight]]]:
        """The part of the samples in the micro-batch that counts, its program, and for each rank the key of
        its moments."""
        if planned is None:
            keys = [(device.kind, Held.NOTHING, NO_FLIGHT) for device in self.costs.cluster.devices]
            return None, program, keys
        assert self.samples is not None  # there are micro-batches
        flight, later = flight_of(program, self.samples, planned), Held.of(planned.scatters)
        keys = [
            (device.kind, later if len(sizes) > 1 else Held.NOTHING, flight)
            for device, sizes in zip(self.costs.cluster.devices, planned.sizes)
        ]
        return largest_parts(planned), costed_micro_step(program, self.samples), keys

    def constants(self, program: Program, computing: Collection[int] = ()) -> list[int]:
        """For each rank, the bytes that the process itself takes, with the communicators of ``program``. The
        ranks in ``computing`` also compute, under other ratios."""
        working = {*program.working_ranks, *computing}
        return self.costs.memory_constants_bytes(self._communicators(program), working=working)

    def _communicators(self, program: Program) -> tuple[Communicator, ...]:
        """The communicators of a program with these instructions, cached by the participating ranks and by
        the sums that are large enough for levels; none if no rank is on a GPU."""
        if all(device.kind == "cpu" for device in self.costs.cluster.devices):
            return ()
        levels = (program.levels, program.buckets) if program.levels is not None else None
        key = (tuple(support(ratio) for _, ratio in program.ratios), program.direct_bytes, levels)
        if key not in self._meetings:
            self._meetings[key] = communicators(program, self.samples, self._summed)
        return self._meetings[key]

    def at_most(self, program: Program) -> tuple[int, ...] | None:
        """An upper bound in bytes per rank of a whole step without micro-batches; None if it needs the
        moments."""
        if self._has_bound is None:
            self._has_bound = self.samples is None and has_bound(program)
        if not self._has_bound:
            return None
        if self._bound is None:
            self._bound = Bound(program, self.optimizer_states, self._step_of(program))
        constant, held = self.constants(program), self._bound.held_bytes(program)
        on_gpu = [device.kind == "gpu" for device in self.costs.cluster.devices]
        losses = ALLOWANCE + SMALL_ALLOWANCE, allocator_loss()
        lost = [losses[gpu] for gpu in on_gpu]
        heap = [POOL_BYTES if gpu else HEAP_BYTES for gpu in on_gpu]
        return tuple(
            round(constant[rank] + held[rank] * (1 + lost[rank]) + heap[rank])
            for rank in range(program.world_size)
        )

    def of(
        self, program: Program, kind: str, held: Held = Held.NOTHING, flight: Flight = NO_FLIGHT
    ) -> Memory:
        """The memory of a program on devices of a kind (``cpu``, ``gpu``). Where gradients have owners, their
        buckets are part of the moments."""
        key = (kind, held, flight, program.buckets)
        if key not in self._memories:
            if self._summed is None:
                self._summed = order_of_sums(program)
            has_owners = any(owned_type(program, i) is not None for i in program.params)
            walked = key if has_owners else (kind, held, flight)
            if walked not in self._walked:
                self._walked[walked] = Walked(
                    program,
                    self.optimizer_states,
                    cuda=kind == "gpu",
                    held=held,
                    flight=flight,
                    step=self._step_of(program),
                )
            self._memories[key] = Memory(
                program, self.optimizer_states, walked=self._walked[walked], summed=self._summed
            )
        return self._memories[key]

    def _step_of(self, program: Program) -> Step:
        if self._step is None:
            self._step = step_of(Outline(program))
        return self._step


def held_moments(program: Program, optimizer_states: OptimizerStates) -> tuple[Sizes, ...]:
    """Unsharded bytes by how they are cut, for every moment that may be the peak: one LP row each."""
    return Memory(program, optimizer_states).envelope()


def peak_memory_bytes(
    program: Program, costs: CostModel, optimizer_states: OptimizerStates = ADAM
) -> tuple[int, ...]:
    """Peak bytes per rank. A rank that takes part in nothing holds its constant memory, and at first the
    whole model."""
    return PeakMemory(costs, optimizer_states).peaks(program)
