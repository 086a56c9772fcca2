"""Simulates a program's step under ratios, buckets and micro-batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from ..base.heap import ROOMY
from ..base.lazy import lazy
from ..base.timeline import Timeline
from ..cost import CostModel
from ..cost.exchanges import Exchange, cut_shares
from ..cost.micro_steps import costed_micro_step, passes
from ..cost.placed import Sheet
from ..cost.sums import gradient_bytes, summed
from ..lang.ir import EVERYWHERE, Buckets, Program, once_program, samples_of, support
from ..lang.optimizer_states import ADAM, OptimizerStates
from ..lang.plan_file import Schedule, accumulates, schedule
from ..step import Alike, Step, membership, step_of
from ..step.memory import PeakMemory
from ..step.order import forward_pass
from .channels import Channels
from .pipeline import Pipeline
from .run import Run
from .sums import NO_SUMS, Sums, sums_of
from .timed import Parts, TimedPass, time_pass
from .values import Call, MicroBatches, Seconds

AGREEMENT_BYTES = 2**10  # limit on the message by which ranks agree on a batch
MAX_STEPS = 5  # limit on the steps simulated until burst credit is the same at the end as at the beginning


def simulate(
    program: Program,
    costs: CostModel,
    *,
    optimizer_states: OptimizerStates = ADAM,
    micro_batches: MicroBatches = None,
    events: bool = False,
    usable_bytes: Sequence[float] = (),
) -> Timeline:
    """Predicts one step of ``program``. ``optimizer_states`` count in its memory; ``micro_batches`` and
    ``usable_bytes`` are those of a plan. Raises PlanError for a program that cannot run in micro-batches."""
    simulation = Simulation(program, costs, optimizer_states, accumulating=accumulates(micro_batches))
    return simulation.promised(program, micro_batches, usable_bytes, events=events)


class Simulation:
    """A program prepared for simulation under any ratios and buckets, and, if ``accumulating``, any
    micro-batches: the order of its events, with all times that do not depend on these."""

    def __init__(
        self,
        program: Program,
        costs: CostModel,
        optimizer_states: OptimizerStates = ADAM,
        *,
        accumulating: bool = False,
    ) -> None:
        samples = samples_of(program) if accumulating else None
        sheet = Sheet(program if samples is None else costed_micro_step(program, samples), costs)
        step = step_of(sheet, program)
        self._prepare(program, step, PeakMemory(costs, optimizer_states, samples, step))

    def on(self, program: Program) -> Simulation:
        """The simulation of the same instructions on other ranks, reusing what does not depend on them. If
        several ranks take part in either, several must take part in the other."""
        samples = None if self.samples is None else samples_of(program)
        own = program if samples is None else costed_micro_step(program, samples)
        sheet = Sheet(own, self.costs, self.sheet.table)
        is_timed = bool(sheet.ranks and self.sheet.ranks)
        step = self.step.on(sheet, sheet.ranks) if is_timed else step_of(sheet, program)
        other = Simulation.__new__(Simulation)
        other._prepare(program, step, self.memory.on(samples, step), self.parts if is_timed else None)
        return other

    def _prepare(
        self, program: Program, step: Step[Sheet], memory: PeakMemory, timed: Parts | None = None
    ) -> None:
        """Prepares the passes; ``timed`` are the passes of the same instructions on other ranks."""
        self.step, self.memory, self.sheet = step, memory, step.outline
        self.costs, self.samples, self.program = memory.costs, memory.samples, self.sheet.program
        rests = [self.costs.rest(r) for r in range(program.world_size)]
        self.network = Channels(self.costs, rests)
        self._sums: dict[tuple, Sums] = {}
        self._last_turn: tuple[tuple, Run, Seconds] | None = None
        loss = self._loss(program)
        for group in dict.fromkeys(s.kind.ranks for s in step.summed):
            self.network.channel("gradient", group)
        slowdown = tuple(self.costs.slowdown(r) for r in range(program.world_size))
        cold = tuple(self.costs.cold(r) for r in range(program.world_size))
        if timed is None:
            forward = time_pass(step.forward, self.sheet, self.network)
            backward = time_pass(step.backward, self.sheet, self.network)
        else:
            forward = timed.forward.on(step.forward, self.network)
            backward = timed.backward.on(step.backward, self.network)
        self.parts: Parts = Parts(self.sheet, self.network, slowdown, cold, forward, backward, loss)
        self._once = self._once_per_step(program)
        self.overhead_s = self._own_work_s(program)
        self.pipeline = None
        if self.samples is not None and self.samples.stages:
            self.pipeline = Pipeline(self.parts, self.samples)

    def _own_work_s(self, program: Program) -> list[float]:
        """For each rank, the seconds of its computing thread in the runtime's own work of a step, or at least
        in the exchange by which ranks agree on the batch; 0 if neither was measured. The message itself is
        short and not counted."""
        working, class_of = program.working_ranks, self.costs.class_of
        out = [0.0] * program.world_size
        if len(working) < 2 or not program.batch_inputs:
            return out
        seconds = {  # devices of one class spend equally long
            c: max(
                self.costs.overhead_s(r),
                self.costs.exchange_host_s(r, "all_gather", working, AGREEMENT_BYTES),
            )
            for c, r in {class_of[r]: r for r in working}.items()
        }
        for r in working:
            out[r] = seconds[class_of[r]]
        return out

    def _once_per_step(self, program: Program) -> tuple[Sheet, TimedPass] | None:
        """Runs the part of the step that comes once, before all micro-batches."""
        once = None if self.samples is None else once_program(program, self.samples)
        if once is None:
            return None
        sheet = Sheet(once, self.costs)
        return sheet, time_pass(forward_pass(sheet), sheet, self.network)

    def differs_in_owners(self, program: Program) -> bool:
        """Whether ``program`` differs from this one at most in the shard owners of parameters."""
        if program.body.computations != self.program.body.computations:
            return False
        names = [name for name in self.sheet.ratio_names if name is not None]
        if any(support(program.ratio_of[n]) != support(self.program.ratio_of[n]) for n in names):
            return False
        return all(a.types == b.types for a, b in zip(program.params, self.program.params))

    def with_owners(self, program: Program) -> Simulation:
        """The simulation of the same program with other shard owners, whose gradients are complete at the
        same times. Not for micro-batches."""
        twin = copy(self)
        twin.program = program
        twin.sheet = Sheet(program, self.costs, self.sheet.table)
        twin.step = self.step.with_owners(twin.sheet)
        twin.memory = PeakMemory(self.costs, self.memory.optimizer_states, step=twin.step)
        twin._sums = {}
        twin._last_turn = None
        forward = time_pass(twin.step.forward, twin.sheet, twin.network)
        twin.parts = replace(self.parts, sheet=twin.sheet, forward=forward)
        return twin

    def run(
        self,
        program: Program,
        micro_batches: MicroBatches = None,
        *,
        events: bool = False,
        usable_bytes: Sequence[float] = (),
    ) -> Timeline:
        """Simulates one step under the ratios and buckets of ``program``, which must have the instructions of
        this simulation, in these micro-batches. If an upper bound shows that every rank needs less than
        ``usable_bytes``, the timeline has no memory peaks (see ``peak_memory_bytes``)."""
        planned = self._schedule(program, micro_batches)
        run = self._run(program, program.buckets, planned, events=events)
        most = self.memory.at_most(program) if usable_bytes else None
        surely = most is not None and all(a <= b for a, b in zip(most, usable_bytes))
        return Timeline(
            max(run.clock),
            () if surely else self.memory.peaks(program, planned),
            tuple([run.busy[k] for k in run.alike.kind_of]),
            run.communication,
            tuple(run.events),
            tuple((link, run.link_busy_s[n]) for link, n in self.network.links.items()) if events else (),
        )

    def peak_memory_bytes(self, program: Program, micro_batches: MicroBatches = None) -> tuple[int, ...]:
        """The peak memory of each rank."""
        return self.memory.peaks(program, self._schedule(program, micro_batches))

    def process_bytes(
        self, program: Program, micro_batches: MicroBatches, usable_bytes: Sequence[float]
    ) -> tuple[int, ...]:
        """The memory that the process of each rank will hold, where it may use so much: more than the peak
        on a CPU with room to spare, whose heap keeps everything (``runtime.allocator``)."""
        planned = self._schedule(program, micro_batches)
        peaks = self.memory.peaks(program, planned)
        pairs = zip(self.costs.cluster.devices, peaks, usable_bytes)
        roomy = [device.kind == "cpu" and ROOMY * peak <= usable for device, peak, usable in pairs]
        if not any(roomy):
            return peaks
        kept = self.memory.peaks(program, planned, roomy=True)
        return tuple(
            min(more, int(usable)) if keeps else peak
            for peak, more, usable, keeps in zip(peaks, kept, usable_bytes, roomy)
        )

    def promised(
        self,
        program: Program,
        micro_batches: MicroBatches,
        usable_bytes: Sequence[float],
        *,
        events: bool = False,
    ) -> Timeline:
        """Simulates one step as ``run``, with the memory of processes that may use so much; that of the step
        alone if it is empty."""
        timeline = self.run(program, micro_batches, events=events)
        if not usable_bytes:
            return timeline
        return replace(timeline, peak_memory_bytes=self.process_bytes(program, micro_batches, usable_bytes))

    def held_bytes(
        self, program: Program, micro_batches: MicroBatches = None
    ) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The bytes that each rank holds at every moment of a step (``PeakMemory.moments``)."""
        return self.memory.moments(program, self._schedule(program, micro_batches))

    def step_s(
        self, program: Program, micro_batches: MicroBatches = None, buckets: Buckets | None = None
    ) -> float:
        """Seconds of a step; ``buckets`` replace those of ``program``."""
        buckets = program.buckets if buckets is None else buckets
        return max(self._run(program, buckets, self._schedule(program, micro_batches)).clock)

    @lazy
    def exchanged_s(self) -> float:
        """The seconds of all exchanges within the passes, one after another; those of a micro-batch when
        accumulating."""
        exchanges = [e for e in self.sheet.exchanges.values() if e is not None]
        each_s = {e: e.seconds(self.costs) for e in dict.fromkeys(exchanges)}
        return sum(each_s[e] for e in exchanges)

    def passes_s(self, device_class: int, share: float) -> float:
        """The seconds of a forward and a backward pass over a share of the batch, on a device of a class."""
        total = 0.0
        counts = zip(
            *(order.counts.sum(axis=0).tolist() for order in (self.parts.forward, self.parts.backward))
        )
        for work, (forward, backward) in zip(self.sheet.works, counts):
            time, part = work.times[device_class], share if work.cut.size else 1.0
            total += forward * time.forward.at(part) + backward * time.backward.at(part)
        return total

    def _schedule(self, program: Program, micro_batches: MicroBatches) -> Schedule | None:
        if self.samples is None:
            return None
        if micro_batches is None:
            raise ValueError("a simulation that accumulates needs micro-batches")
        return schedule(program, micro_batches, self.samples)

    def least_s(self, program: Program) -> tuple[float, float]:
        """Two lower bounds of the step under these ratios, in seconds: without gradient reductions, and for
        any buckets, as if each group of ranks had a single reduction right after the forward pass. Shares are
        not rounded to whole samples."""
        run = self._run(program, None, whole=False)
        sizes: dict[tuple[int, ...], int] = {}
        for s in self.step.summed:
            ranks = s.kind.ranks
            sizes[ranks] = sizes.get(ranks, 0) + gradient_bytes(program.params[s.place], s.cell)
        sums = [summed(program, n, ranks) for ranks, n in sizes.items()]
        summed_s = [s.seconds(self.costs) - s.lag_s(self.costs) for s in sums]
        return max(run.clock), max(*run.clock, run.turn_s + max(summed_s, default=0.0))

    def _run(
        self,
        program: Program,
        buckets: Buckets | None,
        planned: Schedule | None = None,
        *,
        events: bool = False,
        whole: bool = True,
    ) -> Run:
        """Simulates a step with equal burst credit at its beginning and its end. Without ``buckets``,
        gradients are not reduced."""
        run = self._step(program, buckets, planned, events=events, whole=whole)
        for _ in range(MAX_STEPS):
            credit_s = run.credit_s
            if not run.has_credit or np.allclose(credit_s, run.first_credit_s, rtol=0.0, atol=1e-9):
                break
            run = self._step(program, buckets, planned, events=events, whole=whole, credit_s=credit_s)
        return run

    def _step(
        self,
        program: Program,
        buckets: Buckets | None,
        planned: Schedule | None,
        *,
        events: bool,
        whole: bool,
        credit_s: Sequence[float] = (),
    ) -> Run:
        sums = NO_SUMS if buckets is None else self.sums(program, buckets)
        if planned is None and not (events or sums.gathers):
            turn, backward_s = self._turn(program, whole, credit_s)
            run = turn.with_sums(sums)
            run.backward_pass(backward_s)
            return run
        step = program if planned is None else self.program.changed(ratios=program.ratios)
        self._check_pattern(step)
        # events are recorded for each rank, so equal ranks are not grouped
        alike = Alike(range(program.world_size) if events else self._kinds(step, whole, planned))
        run = self._begin(program, step, sums, alike, events, credit_s)
        if planned is None:
            run.micro_step(*self.sheet.seconds(step, whole=whole, ranks=alike.firsts))
            return run
        if self.pipeline is not None:
            part = [sizes[0] / max(sum(sizes), 1) for sizes in planned.sizes]
            seconds = self.sheet.seconds(step, ranks=alike.firsts, part=part)
            self.pipeline.run(run, max(map(len, planned.sizes)), seconds, sums)
            return run
        in_each = NO_SUMS
        if planned.scatters and buckets is not None:
            in_each = self.sums(program, buckets, scattered=True)
        for one in passes(planned):
            seconds = self.sheet.seconds(step, ranks=alike.firsts, part=one.part)
            active = [one.part[rank] is not None for rank in alike.firsts]
            run.micro_steps(one, sums if one.is_last else in_each, active, *seconds)
        return run

    def _begin(
        self,
        program: Program,
        step: Program,
        sums: Sums,
        alike: Alike,
        events: bool = False,
        credit_s: Sequence[float] = (),
    ) -> Run:
        """Begins a step: runs the optimizer, and the part that comes once before all micro-batches."""
        run = Run(self.parts, step, sums, alike, events, credit_s)
        run.optimizer()
        run.start_gathers()
        for kind, rank in enumerate(alike.firsts):
            if self.overhead_s[rank]:
                run.advance(kind, self.overhead_s[rank] + run.cold_s(kind))
        if self._once is not None:
            sheet, forward = self._once
            run.go_through(forward, sheet.seconds(program, ranks=alike.firsts)[0])
        return run

    def _turn(self, program: Program, whole: bool, credit_s: Sequence[float]) -> tuple[Run, Seconds]:
        """Runs a step up to its backward pass; also returns the seconds of the backward pass. The last result
        is kept, because it is the same for all buckets, which planning tries one after another."""
        key = (program.ratios, whole, tuple(credit_s))
        if self._last_turn is None or self._last_turn[0] != key:
            self._check_pattern(program)
            alike = Alike(self._kinds(program, whole, None))
            forward_s, backward_s = self.sheet.seconds(program, whole=whole, ranks=alike.firsts)
            run = self._begin(program, program, NO_SUMS, alike, credit_s=credit_s)
            run.forward_pass(forward_s)
            self._last_turn = key, run, backward_s
        return self._last_turn[1:]

    def _check_pattern(self, program: Program) -> None:
        if self.sheet.pattern_of(program) != self.sheet.pattern:
            raise ValueError("other ranks take part, or other ones communicate: make another Simulation")

    def _kinds(self, program: Program, whole: bool, planned: Schedule | None) -> Iterable[Hashable]:
        """For each rank, everything on which its clock depends: its device, its shares of all values, the
        channels that it is on, and its micro-batches."""
        ratios = [ratio for _, ratio in program.ratios]
        if whole:
            # a value held whole tells whether a rank participates
            held = [cut_shares(EVERYWHERE, ratio, program.world_size) for ratio in ratios]
            held += [self.sheet.shares(cut, program) for cut in self.sheet.cuts]
        else:
            held = ratios
        sizes = [] if planned is None else [planned.sizes]
        return zip(self.costs.class_of, self._met, *held, *sizes)

    @lazy
    def _met(self) -> list[int]:
        """For each rank, a number for the set of channels that it is on; all channels exist after
        ``__init__``."""
        groups = dict.fromkeys(ranks for _, ranks in self.network.numbers)
        return Alike(membership(groups, self.sheet.world_size)).kind_of

    def sums(self, program: Program, buckets: Buckets, *, scattered: bool = False) -> Sums:
        """The gradient reductions under these buckets; if ``scattered``, only those that ZeRO stage 2 makes
        in every micro-batch."""
        key = (scattered, buckets, program.levels)
        if key not in self._sums:
            self._sums[key] = sums_of(
                self.step.reductions(program, buckets, scattered=scattered), self.network
            )
        return self._sums[key]

    def _loss(self, program: Program) -> Call | None:
        """The all-reduce of the loss over all computing ranks, whose result the user sees: every step has
        one, although it is not an instruction."""
        if len(program.working_ranks) < 2:
            return None
        width = 8 if program.types[program.loss].value.dtype == "f64" else 4
        return self.network.call(Exchange("all_reduce", width, program.working_ranks))
