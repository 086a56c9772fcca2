"""Poplar (AAAI'25): ZeRO with a micro-batch, an accumulation count and a part of the state for each device.

For every stage and set of devices:

    room        how many samples a device can hold in a micro-batch, and how much owned state (``Room``)
    curves      seconds of a forward and backward pass over the size of the micro-batch, up to that
    allocate    micro-batch, accumulation and last micro-batch of each device (``mixmesh.zero.allocate``)
    owners      shares of owned state, in proportion to the optimizer's speed as far as memory allows
    judge       the simulator's judgement; the best stage is chosen

If nothing fits, or only in several micro-batches, the same is tried with regions of the model rematerialised
in the backward pass (``recomputed``): larger micro-batches then fit, and fewer of them gather and sum less.

This departs from the paper, which takes the first stage that fits and divides owned state evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from ..errors import PlanError
from ..lang.ir import Program, Ratio, make_ratio, regions, support, with_whole_rows
from ..lang.plan_file import MicroBatch
from ..passes.buckets import bucketings
from ..passes.recomputation import recomputed
from ..passes.zero import Allocation, allocate, with_stage
from ..search.placement.lower import even_over
from ..search.ratios import with_ratio
from ..simulator import MicroBatches, Simulation
from ..step.memory import Held
from .device_sets import ABOUT, device_sets, least_parallel_s, sets_in_need
from .passes import REMATERIALISATION
from .proposal import Proposal
from .room import Room
from .state_room import able_ranks, stages_with_room
from .task import HOPEFUL, USUAL_BYTES, Task

HIDDEN = (1.0, 0.25)  # shares of the collectives' seconds that a micro-batch is assumed to wait for
# shares of a device's memory budget that are left free because rows are not divided
SPARE = (0.0, 0.02, 0.06, 0.2)
RESERVES = 16  # steps between giving all memory to samples and giving it to owned state first
COMMON = 2  # the first stage whose devices share one number of micro-batches
ONCE_S = 1e9  # seconds of collectives that rule out a second micro-batch
AGAIN = 1.25  # rough factor on the seconds of computing if activations are rematerialised
GROWTH = 1.2  # factor between neighbouring micro-batches of a curve


def poplar(task: Task) -> Iterator[Proposal]:
    """Yields the best allocation of every stage, on all devices and on only the faster ones; with a short
    budget, only allocations that may become the fastest plan."""
    best_s, is_any, tried = float("inf"), False, Tried()
    sets: list[tuple[int, ...]] = []
    if task.best_s < float("inf") or fits_somehow(task):
        # in every stage, gradients are summed as in data parallelism, or scattered and then gathered
        sets = sorted(device_sets(task), key=lambda ranks: (least_parallel_s(task, ranks), -len(ranks)))
        sets += sets_in_need(task)
    for ranks in sets:
        is_slower = ABOUT * least_parallel_s(task, ranks) >= min(best_s, enough_s(task))
        if is_slower or not idle_ranks_fit(task, ranks):
            continue
        short = []  # ZeRO stages in which some rank lacks the memory to take its whole share at once
        for stage in stages_with_room(task, ranks):
            task.progress(f"planning: poplar, stage {stage}, {len(ranks)} devices")
            for proposal in Staged(task, stage, ranks, tried=tried).proposals():
                is_any = True
                if proposal.feasible:
                    best_s = min(best_s, proposal.timeline.step_s)
                yield proposal
            if not tried[stage, ranks]:
                short.append(stage)
        for stage in short:
            if min(best_s, enough_s(task)) <= AGAIN * task.least_seconds(ranks):
                break
            for recomputed_one in computed_again(task, stage, ranks, best_s):
                is_any, best_s = True, recomputed_one.timeline.step_s
                yield recomputed_one
    if not is_any and enough_s(task) == float("inf"):  # the closest: the least memory on each device
        yield task.judge("poplar", Staged(task, 3, tuple(range(task.world_size))).program)


def fits_somehow(task: Task) -> bool:
    """Whether memory may suffice for some allocation. A stage that does not fit on all devices together, with
    activations rematerialised, fits on no set of fewer devices: each of them would have to hold more."""
    every = tuple(range(task.world_size))
    plain = task.made_once(recomputed, task.data_parallel(task.shares(every)))

    def has_allocation(stage: int) -> bool:
        staged = Staged(task, stage, every, plain)
        rooms = ((staged.room(0.0, simulation), simulation) for simulation in staged.simulations())
        allocations = (found for room, simulation in rooms for found in staged.allocations(room, simulation))
        return next(allocations, None) is not None

    # not the last one alone: one large parameter takes more memory if it is gathered beside its pieces
    return any(map(has_allocation, reversed(stages_with_room(task, every))))


def enough_s(task: Task) -> float:
    """The seconds of the fastest plan so far, which a proposal has to beat; infinite if the budget pays for
    everything."""
    return float("inf") if task.budget.is_ample else task.best_s


def computed_again(task: Task, stage: int, ranks: tuple[int, ...], best_s: float) -> Iterator[Proposal]:
    """The best with rematerialised activations, if it fits and is faster than ``best_s``."""
    program = task.made_once(recomputed, task.data_parallel(task.shares(ranks)))
    if not regions(program):
        return
    task.progress(f"planning: poplar, stage {stage}, {len(ranks)} devices, computing again")
    staged = Staged(task, stage, ranks, program, best_s)
    best = min((p for p in staged.proposals() if p.feasible), key=lambda p: p.key, default=None)
    if best is not None and best.timeline.step_s < best_s:
        yield REMATERIALISATION(task, best, task.budget)


# for every stage and set of devices that was tried: whether memory suffices to take all samples at once
Tried = dict[tuple[int, tuple[int, ...]], bool]


class Staged:
    """Data parallelism on some devices in a ZeRO stage, unless that was ``tried``; made from ``plain``, if
    that is given and may be faster than ``best_s``."""

    def __init__(
        self,
        task: Task,
        stage: int,
        ranks: tuple[int, ...],
        plain: Program | None = None,
        best_s: float = float("inf"),
        tried: Tried | None = None,
    ) -> None:
        self.task, self.stage, self.ranks, self.best_s = task, stage, ranks, best_s
        self.tried = Tried() if tried is None else tried
        self.again = plain is not None
        plain = plain or task.data_parallel(task.shares(ranks))
        program = task.made_once(in_stage, plain, stage)
        owners: set[str | None] = {name for name, _ in program.ratios[len(plain.ratios) :]}
        (self.owners,) = owners or {None}
        self.program = self.owned_as(program, even_over(ranks, task.world_size))
        self.passes_s: dict[tuple[int, int], float] = {}  # by class of devices and samples

    def proposals(self) -> Iterator[Proposal]:
        """The best of several numbers of micro-batches, and the step without any."""
        if (self.stage, self.ranks) in self.tried:
            return
        self.tried[self.stage, self.ranks] = False
        if self.stage and self.owners is None:
            return  # nothing has an owner
        able = able_ranks(self.task, self.stage, self.ranks)
        if able != self.ranks:
            if able:
                yield from self.on_fewer(able)
            return
        for simulation in self.simulations():
            for spare in SPARE:
                judged_plans = list(self.judge(spare, simulation))
                yield from judged_plans
                if not judged_plans or any(p.feasible for p in judged_plans):
                    break

    def simulations(self) -> Iterator[Simulation]:
        """Simulations in micro-batches, if the program can run in them, and without any."""
        with suppress(PlanError):  # a value of the whole batch depends on parameters
            yield self.task.simulation(self.program, accumulating=True)
        yield self.task.simulation(self.program)

    def judge(self, spare: float, simulation: Simulation) -> Iterator[Proposal]:
        accumulating, room = simulation.samples is not None, self.room(spare, simulation)
        if not accumulating and sum(room.largest(0).values()) < self.task.batch:
            return
        for allocation, owners in self.allocations(room, simulation):
            ranks = support(allocation.samples)
            if ranks != self.ranks:
                yield from self.on_fewer(ranks)
                continue
            program = self.program.with_shares(make_ratio(allocation.samples))
            program = self.owned_as(program, owners)
            planned, proposal = rows(allocation) if accumulating else None, None
            if not self.is_lost(program, simulation, planned):
                yield (proposal := self.task.best_buckets("poplar", program, simulation, planned))
            if not accumulating and (proposal is None or proposal.feasible):
                self.tried[self.stage, self.ranks] = True

    def on_fewer(self, ranks: tuple[int, ...]) -> Iterator[Proposal]:
        """The same on the devices that have enough memory."""
        if not self.again:
            yield from Staged(self.task, self.stage, ranks, tried=self.tried).proposals()

    def room(self, spare: float, simulation: Simulation) -> Room:
        """The memory for samples and owned state, with a part ``spare`` of it left free."""
        held = Held.NOTHING if simulation.samples is None else Held.of(self.stage == 2)
        return Room(self.task, simulation.program, self.ranks, self.owners, held, spare, simulation.memory)

    def allocations(self, room: Room, simulation: Simulation) -> Iterator[tuple[Allocation, Ratio | None]]:
        """Yields different allocations, with the shares of the owners, that would be fast enough if
        collectives were free: for several shares of their seconds that a micro-batch waits for, and with
        numbers of micro-batches of each device and in common."""
        accumulating = simulation.samples is not None
        in_each_s = micro_step_s(simulation, self.program)
        prices = [in_each_s * share for share in HIDDEN] if accumulating else [ONCE_S]
        # in stages 0 and 1 every device may have its own number; a common one can allow larger micro-batches
        counted = dict.fromkeys((self.stage, COMMON)) if accumulating else (COMMON,)
        seen = set()
        for price_s, together in product(prices, counted):
            found = self.allocated(room, price_s, together, simulation)
            if found is None or accumulating != (max(found[0].accumulation_steps) > 1):
                continue
            allocation, owners = found
            if allocation.step_s - price_s * max(allocation.accumulation_steps) > self.limit_s:
                continue
            if (rows(allocation), owners) not in seen:
                seen.add((rows(allocation), owners))
                yield allocation, owners

    @property
    def limit_s(self) -> float:
        """The seconds of the best step so far; allocations that must take longer are not examined."""
        return min(self.best_s, enough_s(self.task))

    def is_lost(self, program: Program, simulation: Simulation, micro_batches: MicroBatches) -> bool:
        """Whether a program is too slow to become the fastest by other buckets or another order."""
        if enough_s(self.task) == float("inf"):
            return False
        program = self.task.in_our_sums("poplar", program)
        (buckets,) = bucketings(program, (USUAL_BYTES,), simulation.step.summed)
        return simulation.step_s(program, micro_batches, buckets) > HOPEFUL * enough_s(self.task)

    def owned_as(self, program: Program, owners: Ratio | None) -> Program:
        """``program`` with these shares for the owners, if it has any."""
        if owners is None or self.owners is None:
            return program
        return with_ratio(program, self.owners, owners)

    def allocated(
        self, room: Room, price_s: float, together: int, simulation: Simulation
    ) -> tuple[Allocation, Ratio | None] | None:
        """The allocation that leaves room for everything that is owned, with the shares of the owners; None
        if there is none. It reserves as small a share of each device's memory as possible, the same on all.
        """
        best = self.attempt(room, 1.0, price_s, together, simulation)
        low, high = -1, RESERVES
        while best is not None and self.owners is not None and low + 1 < high:
            middle = (low + high) // 2
            middle_one = self.attempt(room, middle / RESERVES, price_s, together, simulation)
            low, high, best = (middle, high, best) if middle_one is None else (low, middle, middle_one)
        return best

    def attempt(
        self, room: Room, reserve: float, price_s: float, together: int, simulation: Simulation
    ) -> tuple[Allocation, Ratio | None] | None:
        largest = {r: self.confirmed(r, most) for r, most in room.largest(reserve).items()}
        able = [r for r in self.ranks if largest[r]]
        if not able:
            return None
        curves = [self.curve(r, largest[r], simulation) for r in able]
        on_able = allocate(curves, self.task.batch, stage=together, collective_s=price_s)
        allocation = on_ranks(on_able, able, self.task.world_size)
        if self.owners is None:
            return allocation, None
        owners = room.owners(allocation.micro_batch)
        return None if owners is None else (allocation, owners)

    def confirmed(self, rank: int, samples: int) -> int:
        """Limits ``samples`` to the largest micro-batch that was confirmed by running, if any was tried."""
        tried = None if self.again else self.task.costs.largest_micro_batch(rank, self.stage)
        return samples if tried is None else min(samples, tried)

    def curve(self, rank: int, largest: int, simulation: Simulation) -> tuple[list[int], list[float]]:
        """Micro-batch sizes up to the largest, and the seconds of a forward and backward pass of each."""
        sizes, kind = [1], self.task.costs.class_of[rank]
        while sizes[-1] < largest:
            sizes.append(min(max(sizes[-1] + 1, round(sizes[-1] * GROWTH)), largest))
        for m in sizes:
            if (kind, m) not in self.passes_s:
                self.passes_s[kind, m] = simulation.passes_s(kind, m / self.task.batch)
        return sizes, [self.passes_s[kind, m] for m in sizes]


def idle_ranks_fit(task: Task, ranks: tuple[int, ...]) -> bool:
    """Whether the other ranks have the memory for taking no part: they receive the initial values and the
    loss."""
    idle = set(range(task.world_size)) - set(ranks)
    if not idle:
        return True
    program = task.in_our_sums("poplar", task.data_parallel(task.shares(ranks)))
    peaks = task.simulation(program).memory.peaks(program)
    return all(peaks[rank] <= task.usable_bytes[rank] for rank in idle)


def in_stage(program: Program, stage: int) -> Program:
    """A program in a ZeRO stage, with equal shares for the owners."""
    even = even_over(support(program.shares), program.world_size)
    return with_stage(with_whole_rows(program), stage, even)


def micro_step_s(simulation: Simulation, program: Program) -> float:
    """Seconds of the collectives of a micro-batch."""
    calls = (*simulation.parts.forward.started, *simulation.parts.backward.started)
    scattered = simulation.sums(program, program.buckets, scattered=True)
    return sum(call.seconds for call in (*calls, *scattered.calls))


def on_ranks(found: Allocation, ranks: Sequence[int], world_size: int) -> Allocation:
    """Extends an allocation to some ranks to all ranks; the others have no samples."""

    def spread(values: Sequence[int]) -> tuple[int, ...]:
        value_of = dict(zip(ranks, values))
        return tuple(value_of.get(r, 0) for r in range(world_size))

    return replace(
        found,
        micro_batch=spread(found.micro_batch),
        accumulation_steps=spread(found.accumulation_steps),
        last_micro_batch=spread(found.last_micro_batch),
    )


def rows(allocation: Allocation) -> tuple[MicroBatch, ...]:
    parts = zip(allocation.micro_batch, allocation.accumulation_steps, allocation.last_micro_batch)
    return tuple(MicroBatch(*part) for part in parts)
