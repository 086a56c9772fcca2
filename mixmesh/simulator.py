"""The event simulator: a program's step as it unfolds on every rank.

Per rank a computing thread; per process group a channel on which collectives follow each other; per machine
a NIC out and in and a link inside, which the channels that cross them share. Gradient sums have channels of
their own, as in the runtime.

Forward, a redistribution starts at its place and is awaited at its first use. In the backward pass it starts
after that use and is awaited at its place; the gradients of stored parameters, and the sums of buckets, go on
beside the computing and are awaited when the pass ends, before the optimizer. Nothing else makes ranks wait
for each other, so the step is a steady-state period: from one end of the waiting to the next, beginning with
the optimizer. Where ranks do not all wait for the same last collective, that is no shorter than the period.

A second of computing takes ``1 + slowdown`` while a collective that the rank has issued is under way, and a
collective keeps the computing thread busy for some time, half where it starts and half where it is awaited.

Every time is a composition of sums, maxima and minima that grows with each duration, so that no device or
link that gets faster can make the predicted step longer. That decides what is approximated:

- Channels share a link fairly: a collective takes as much longer as the others, while they are busy there,
  take of it. Those that stand earlier in the program are not slowed by it. What they lose is made up for by
  the gradient sums that follow, which end when the link has carried all that it was given before, and by the
  end of the pass. A link that served by time of arrival would have anomalies.
- By the same rule a collective that stands earlier in the program but starts later is taken to be in the
  way: at the most this doubles the time of the other, once per channel; only a gradient sum is held up by it.
- A gradient sum that some rank joins only at the end of its pass slows nobody's computing meanwhile.
- Gradients that arrive during the pass are taken in at its end, those out of gathered factors computed then.
- The sum of the loss is awaited with the gradients; the runtime waits for it after the optimizer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .cost import VIEWS, CostModel
from .cost.memory import PeakMemory
from .cost.micro_steps import Pass, costed_micro_step, passes, with_ratios_of
from .cost.placed import (
    Exchange,
    Sheet,
    communicates,
    cut_shares,
    exchange_of,
    is_factored,
    is_resharded,
    is_stored,
    synchronised,
)
from .cost.resources import Link, links_of
from .cost.sums import IN_FLIGHT_BYTES, GradientSum, gradient_sums, order_of_sums
from .ir import LEAVES, Instruction, Program, once_program, owned_type, samples_of
from .plan_file import MicroBatch, Schedule, accumulates, schedule
from .rules import RULES
from .timeline import (
    LOSS_SUM,
    Event,
    Timeline,
    bucket_name,
    factors_name,
    gradient_name,
    parameters_name,
    product_name,
    repeated_name,
)

MicroBatches = tuple[MicroBatch, ...] | None  # per rank; None, or one each, is a step without micro-steps
Seconds = Sequence[Sequence[float]]  # by work and kind of rank


def simulate(
    program: Program,
    costs: CostModel,
    *,
    optimizer_states: int = 2,
    micro_batches: MicroBatches = None,
    events: bool = False,
) -> Timeline:
    """Predicts one step of ``program``. ``optimizer_states`` is tensors per parameter (Adam: 2);
    ``micro_batches`` are those of a plan. Raises PlanError for a program that cannot run in micro-steps."""
    simulation = Simulation(program, costs, optimizer_states, accumulating=accumulates(micro_batches))
    return simulation.run(program, micro_batches, events=events)


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective with all that does not depend on when it starts."""

    exchange: Exchange
    channel: int
    seconds: float
    links: tuple[tuple[int, float], ...]  # by number, seconds for which it occupies each
    longest: float  # of these
    yields: bool  # a gradient sum, which nobody waits for soon
    host: tuple[float, ...]  # per rank of the exchange: half of what it costs the computing thread, or empty


@dataclass(frozen=True, slots=True)
class _Step:
    """A run of computations, and what comes after it: at most one of the others."""

    works: tuple[tuple[int, str, str], ...]  # (work, name, operator)
    awaited: str = ""  # a value on its way
    call: _Call | None = None
    name: str = ""
    value: str = ""  # what the call brings, awaited later; empty if it never is
    taken_in: tuple[int, str] | None = None  # at the end of the pass: (work of the product or -1, name)
    point: int | None = None  # gradients are complete here
    used: str = ""  # an owned parameter, brought up to date by now


class _Alike:
    """Ranks by kind: those of one kind do the same at the same times, so that one clock serves for them.
    ``kinds`` is what they are told apart by."""

    def __init__(self, kinds: Iterable[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.kind_of = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        firsts = [-1] * len(numbers)
        for rank, kind in enumerate(self.kind_of):
            if firsts[kind] < 0:
                firsts[kind] = rank
        self.firsts = tuple(firsts)  # by kind, its first rank
        self._kinds: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The kinds of some ranks."""
        if ranks not in self._kinds:
            self._kinds[ranks] = tuple(dict.fromkeys(self.kind_of[r] for r in ranks))
        return self._kinds[ranks]

    def ranks(self, kinds: Iterable[int]) -> tuple[int, ...]:
        wanted = set(kinds)
        return tuple(r for r, kind in enumerate(self.kind_of) if kind in wanted)


def _membership(groups: Iterable[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    """Per rank, which of some groups it is in."""
    found: list[list[int]] = [[] for _ in range(world_size)]
    for number, ranks in enumerate(groups):
        for r in ranks:
            found[r].append(number)
    return list(map(tuple, found))


class Simulation:
    """A program ready to be simulated under other ratios and buckets, and if ``accumulating`` in whatever
    micro-steps: the order of what happens, with all times that do not depend on them."""

    def __init__(
        self, program: Program, costs: CostModel, optimizer_states: int = 2, *, accumulating: bool = False
    ) -> None:
        self.costs = costs
        self.samples = samples_of(program) if accumulating else None
        self.step = program if self.samples is None else costed_micro_step(program, self.samples)
        self.sheet = Sheet(self.step, costs)
        self.memory = PeakMemory(costs, optimizer_states, self.samples)
        self.slowdown = [costs.slowdown(r) for r in range(program.world_size)]
        self.channels: dict[tuple[str, tuple[int, ...]], int] = {}
        self.rivals: list[list[tuple[int, frozenset[int]]]] = []  # per channel: others, and what they share
        self.crossed: list[frozenset[int]] = []  # per channel: links, by number
        self.links: dict[Link, int] = {}
        self._calls: dict[tuple[str, Exchange], _Call] = {}
        self._s_per_byte: dict[tuple, dict[Link, float]] = {}
        self._sums: dict[tuple, _Sums] = {}
        self.loss = self._loss(program)
        self.summed = order_of_sums(program)
        self.points = _ready_points(self.step, self.sheet)
        for i in program.params:
            if synchronised(program, i):
                self._channel("gradient", program.participants(i.type))
        self.forward = _Forward(self, self.sheet).steps
        self.backward = _Backward(self, self.sheet).steps
        self.forward_counts = _counts(self.forward, self.sheet)
        self.backward_counts = _counts(self.backward, self.sheet)
        once = None if self.samples is None else once_program(program, self.samples)
        self.once = None if once is None else Sheet(once, costs)
        self.once_forward = [] if once is None else _Forward(self, self.once).steps

    def run(self, program: Program, micro_batches: MicroBatches = None, *, events: bool = False) -> Timeline:
        """One step under the ratios and buckets of ``program``, whose instructions must be those that the
        simulation was made from, in these micro-steps."""
        planned = self._schedule(program, micro_batches)
        run = self._run(program, self.sums(program), planned, events=events)
        return Timeline(
            max(run.clock),
            self.memory.peaks(program, planned),
            tuple([run.busy[k] for k in run.alike.kind_of]),
            run.communication,
            tuple(run.events),
        )

    def step_s(self, program: Program, micro_batches: MicroBatches = None) -> float:
        """The step's seconds alone."""
        return max(self._run(program, self.sums(program), self._schedule(program, micro_batches)).clock)

    def passes_s(self, device_class: int, share: float) -> float:
        """Seconds of a forward and a backward pass over a share of the batch, on a device of a class."""
        total = 0.0
        counts = zip(self.forward_counts.sum(axis=0).tolist(), self.backward_counts.sum(axis=0).tolist())
        for work, (forward, backward) in zip(self.sheet.works, counts):
            time, part = work.times[device_class], share if work.cut[0] else 1.0
            total += forward * time.forward.at(part) + backward * time.backward.at(part)
        return total

    def _schedule(self, program: Program, micro_batches: MicroBatches) -> Schedule | None:
        if self.samples is None:
            return None
        return schedule(program, micro_batches, self.samples)

    def least_s(self, program: Program) -> tuple[float, float]:
        """What the step does not go below under these ratios if sums of gradients are free, and what it does
        not go below whatever the buckets: each group of ranks makes one sum right after the forward pass.
        Shares are not rounded to whole samples."""
        run = self._run(program, NO_SUMS, whole=False)
        sizes: dict[tuple[int, ...], int] = {}
        for s in self.summed:
            sizes[s.kind[1]] = sizes.get(s.kind[1], 0) + program.params[s.place].type.value.size_bytes
        summed_s = [Exchange("all_reduce", n, ranks).seconds(self.costs) for ranks, n in sizes.items()]
        return max(run.clock), max(*run.clock, run.turn_s + max(summed_s, default=0.0))

    def _run(
        self,
        program: Program,
        sums: _Sums,
        planned: Schedule | None = None,
        *,
        events: bool = False,
        whole: bool = True,
    ) -> _Run:
        step = program if planned is None else with_ratios_of(self.step, program)
        if self.sheet.pattern_of(step) != self.sheet.pattern:
            raise ValueError("other ranks take part, or other ones communicate: make another Simulation")
        # events tell equal ranks apart
        alike = _Alike(range(program.world_size) if events else self._kinds(step, whole, planned))
        run = _Run(self, step, sums, alike, events)
        run.optimizer()
        run.start_gathers()
        if self.once is not None:
            counts = _counts(self.once_forward, self.once)
            run.steps(self.once_forward, counts, self.once.seconds(program, ranks=alike.firsts)[0])
        if planned is None:
            run.micro_step(*self.sheet.seconds(step, whole=whole, ranks=alike.firsts))
            return run
        in_each = self.sums(program, scattered=True) if planned.scatters else NO_SUMS
        for one in passes(planned):
            seconds = self.sheet.seconds(step, ranks=alike.firsts, part=one.part)
            active = [one.part[rank] is not None for rank in alike.firsts]
            run.micro_steps(one, sums if one.is_last else in_each, active, *seconds)
        return run

    def _kinds(self, program: Program, whole: bool, planned: Schedule | None) -> Iterable[Hashable]:
        """Per rank what its clock depends on: the device, what it holds of everything, with whom it meets,
        and its micro-steps."""
        ratios = [ratio for _, ratio in program.ratios]
        if whole:
            # with no size, whether it takes part
            held = [cut_shares((0, 1, None), ratio, program.world_size) for ratio in ratios]
            held += [self.sheet.shares(cut, program) for cut in self.sheet.cuts]
        else:
            held = ratios
        sizes = [] if planned is None else [planned.sizes]
        return zip(self.costs.class_of, self._met, *held, *sizes)

    @cached_property
    def _met(self) -> list[int]:
        """Per rank a number for the channels that it is on; all of them are known after ``__init__``."""
        groups = dict.fromkeys(ranks for _, ranks in self.channels)
        return _Alike(_membership(groups, self.sheet.world_size)).kind_of

    @cached_property
    def in_sums(self) -> _Alike:
        """Ranks whose gradients are complete at the same points, whatever the buckets."""
        groups = dict.fromkeys(who for points in self.points.values() for _, who in points)
        groups |= dict.fromkeys(s.kind[1] for s in self.summed)
        return _Alike(_membership(groups, self.sheet.world_size))

    def call(self, exchange: Exchange, purpose: str = "data") -> _Call:
        key = (purpose, exchange)
        if key not in self._calls:
            self._calls[key] = self._call(purpose, exchange)
        return self._calls[key]

    def _call(self, purpose: str, exchange: Exchange) -> _Call:
        kind = (exchange.performed, exchange.ranks, exchange.sent)
        if kind not in self._s_per_byte:
            self._s_per_byte[kind] = exchange.link_s_per_byte(self.costs.cluster)
        name, ranks, size_bytes = exchange.performed, exchange.ranks, exchange.size_bytes
        alone = max((self.costs.exchange_alone_s(r, name, ranks, size_bytes) for r in ranks), default=0.0)
        # what its seconds hold of the computing threads is counted there, slower
        seconds = max(exchange.seconds(self.costs) - alone, 0.0)
        # where a collective was measured to be faster than the cluster file allows, it holds no link longer
        links = [(link, min(s * size_bytes, seconds)) for link, s in self._s_per_byte[kind].items()]
        host = tuple(self.costs.exchange_host_s(r, name, ranks, size_bytes) / 2 for r in ranks)
        channel = self._channel(purpose, exchange.ranks)
        return _Call(
            exchange,
            channel,
            seconds,
            tuple((self.links[link], s) for link, s in links),
            max((s for _, s in links), default=0.0),
            purpose == "gradient",
            host if any(host) else (),
        )

    def _channel(self, purpose: str, ranks: tuple[int, ...]) -> int:
        """The number of a process group. All are known before the first step is simulated."""
        key = (purpose, ranks)
        if key not in self.channels:
            number = self.channels[key] = len(self.channels)
            crossed = links_of(self.costs.cluster, ranks)
            mine = frozenset(self.links.setdefault(link, len(self.links)) for link in sorted(crossed))
            self.rivals.append([])
            for other, theirs in enumerate(self.crossed):
                if mine & theirs:
                    self.rivals[number].append((other, mine & theirs))
                    self.rivals[other].append((number, mine & theirs))
            self.crossed.append(mine)
        return self.channels[key]

    def sums(self, program: Program, *, scattered: bool = False) -> _Sums:
        """The sums of gradients under the buckets of ``program``, or those of them that every micro-step of
        ZeRO stage 2 makes."""
        key = (scattered, *(p.attr("bucket") if p.attrs else None for p in program.params))
        if key not in self._sums:
            every = gradient_sums(program, order=self.summed)
            self._sums[key] = _sums(self, tuple(s for s in every if s.stage == 2 or not scattered))
        return self._sums[key]

    def _loss(self, program: Program) -> _Call | None:
        """The sum of the loss over all ranks, for the user to see: in no instruction, but in every step."""
        if program.world_size < 2:
            return None
        width = 8 if program.types[program.loss].value.dtype == "f64" else 4
        return self.call(Exchange("all_reduce", width, tuple(range(program.world_size))))


def _counts(steps: list[_Step], sheet: Sheet) -> np.ndarray:
    """How often each work stands in each step that has any."""
    busy = [step for step in steps if step.works]
    counts = np.zeros((len(busy), len(sheet.works)))
    for row, step in zip(counts, busy):
        for work, _, _ in step.works:
            row[work] += 1
    return counts


# --- the order of what happens ----------------------------------------------------------------------------


class _Order:
    """Steps in the making."""

    def __init__(self, simulation: Simulation, sheet: Sheet) -> None:
        self.simulation, self.sheet, self.program = simulation, sheet, sheet.program
        self.steps: list[_Step] = []
        self.works: list[tuple[int, str, str]] = []
        self.make()
        self.close()

    def make(self) -> None:
        raise NotImplementedError

    def close(self, **what) -> None:
        if what or self.works:
            self.steps.append(_Step(tuple(self.works), **what))
            self.works.clear()

    def start(self, name: str, exchange: Exchange, value: str = "", **what) -> None:
        self.close(name=name, call=self.simulation.call(exchange), value=value, **what)

    def finish_of(self, i: Instruction, n: int) -> int:
        """Where the runtime waits for a redistribution, and makes autograd's node for it: at its first use;
        the loss at the end; what nobody uses at once."""
        end = len(self.program.instructions) if i.result == self.program.loss else n
        return self.sheet.uses.get(i.result, (end,))[0]


class _Forward(_Order):
    def make(self) -> None:
        program = self.program
        coming: dict[int, list[str]] = {}  # by where they are awaited
        owned = {p.result for p in program.params if owned_type(program, p) is not None}
        for n, i in enumerate(program.instructions):
            for name in [name for name in dict.fromkeys(i.inputs) if name in owned]:
                owned.remove(name)
                self.close(used=name)
            if n in coming:
                for name in [name for name in dict.fromkeys(i.inputs) if name in coming[n]]:
                    self.close(awaited=name)
            if n in self.sheet.work_of:
                self.works.append((self.sheet.work_of[n], shown(i), i.op))
            exchange = exchange_of(program, i)
            if exchange is not None:
                self.start(i.result, exchange, i.result)
                at = self.finish_of(i, n)
                if at == n:
                    self.close(awaited=i.result)
                else:
                    coming.setdefault(at, []).append(i.result)
        for name in coming.get(len(program.instructions), ()):
            self.close(awaited=name)


class _Backward(_Order):
    """Autograd runs nodes in the reverse of the order in which they were made."""

    def make(self) -> None:
        program, sheet = self.program, self.sheet
        points = {point for groups in self.simulation.points.values() for point, _ in groups}
        again = self._repeated()
        moved = self._moved()
        self.returning: set[str] = set()  # what goes back to a place that is still to come
        self.gathered: set[str] = set()  # factors
        coming: set[str] = set()
        for n in range(len(program.instructions), -1, -1):
            i = program.instructions[n] if n < len(program.instructions) else None
            if i is not None and i.is_redistribution and i.result in self.returning:
                self.close(awaited=gradient_name(i.result))
            for gather in again.get(n, ()):
                self.start(
                    repeated_name(gather.result), exchange_of(program, gather), repeated_name(gather.result)
                )
                coming.add(gather.result)
            if i is not None and sheet.flows[n] and n in sheet.work_of:
                for name in [n for n in dict.fromkeys(i.inputs) if n in coming and keeps(program, i, n)]:
                    coming.remove(name)
                    self.close(awaited=repeated_name(name))
                self._factors(n, i)
                self.works.append((sheet.work_of[n], gradient_name(shown(i)), i.op))
            if n in points:
                self.close(point=n)
            for redistribution in moved.get(n, ()):
                self._gradient(redistribution)

    def _moved(self) -> dict[int, list[Instruction]]:
        """Redistributions with a gradient, by where autograd's node for them was made, last first."""
        program = self.program
        out: dict[int, list[Instruction]] = {}
        for n, i in enumerate(program.instructions):
            if i.is_redistribution and i.result in program.requires_grad and communicates(program, i):
                out.setdefault(self.finish_of(i, n), []).append(i)
        for n, moved in out.items():
            if n < len(program.instructions):
                order = {name: k for k, name in enumerate(program.instructions[n].inputs)}
                moved.sort(key=lambda i: -order.get(i.result, -1))
        return out

    def _repeated(self) -> dict[int, list[Instruction]]:
        """Gathers that are repeated, by the last use of what they bring, last first."""
        program = self.program
        out: dict[int, list[Instruction]] = {}
        for i in program.instructions:
            if not (i.op == "all_gather" and is_resharded(program, i) and exchange_of(program, i)):
                continue
            uses = self.sheet.uses.get(i.result)
            if i.result in program.requires_grad and uses:
                last = program.instructions[uses[-1]]
                plain = not last.is_redistribution and last.op not in (*LEAVES, "update")
                if plain and last.results[0] in program.requires_grad:
                    out.setdefault(uses[-1], []).insert(0, i)
        return out

    def _gradient(self, i: Instruction) -> None:
        exchange = exchange_of(self.program, i, backward=True)
        if exchange is None:
            return
        name = gradient_name(i.result)
        if is_stored(self.program, i):
            self.start(name, exchange, taken_in=(-1, name))
        else:
            self.start(name, exchange, name)
            self.returning.add(i.result)

    def _factors(self, n: int, i: Instruction) -> None:
        """With ``sfb``: what the weight's gradient is made of is gathered before the input's is computed."""
        program = self.program
        if not is_factored(i) or len(ranks := program.participants(i.type)) < 2:
            return
        name = factors_name(i.result)
        product = (self.sheet.factor_work_of[n], product_name(i.result))
        needed = [i.type]
        if i.inputs[1] in program.requires_grad and i.inputs[0] not in self.gathered:
            self.gathered.add(i.inputs[0])  # by the first product that needs it, for all of them
            needed.append(program.types[i.inputs[0]])
        for k, factor in enumerate(needed, 1):
            last = product if k == len(needed) and i.inputs[1] in program.requires_grad else (-1, name)
            self.start(name, Exchange("all_gather", factor.value.size_bytes, ranks), taken_in=last)


KEEPS_NO_PARAMETER = VIEWS | {"aten.add.Tensor", "aten.sub.Tensor", "aten._to_copy", "aten.embedding"}


def keeps(program: Program, user: Instruction, name: str) -> bool:
    """Whether autograd needs an input of an instruction again, for the gradients of the others."""
    if user.op in KEEPS_NO_PARAMETER:
        return False
    rule = RULES.get(user.op)
    if rule is None or not rule.flops:
        return True
    factors = user.inputs[:2]  # a third one is a bias
    return name in factors and any(f != name and f in program.requires_grad for f in factors)


Points = tuple[tuple[int, tuple[int, ...]], ...]


def _ready_points(program: Program, sheet: Sheet) -> dict[str, Points]:
    """For each parameter whose gradient is summed: where in the backward pass it is complete, by ranks.

    A point is the instruction after whose backward that is. A rank that makes no use of a parameter is in
    none: it sends its zeros when its pass ends.
    """
    out: dict[str, Points] = {}
    for p in program.params:
        if not synchronised(program, p):
            continue
        left = set(program.participants(p.type))
        found: list[tuple[int, tuple[int, ...]]] = []
        for n in sheet.uses.get(p.result, ()):
            user = program.instructions[n]
            if not sheet.flows[n]:
                continue
            types = (p.type,) if user.is_redistribution else user.types
            who = left.intersection(*(program.participants(t) for t in types))
            if who:
                found.append((n, tuple(sorted(who))))
                left -= who
        out[p.result] = tuple(found)
    return out


AT_THE_END = -2  # a point below all others


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of gradients: what they are, and at which point which ranks issue their part of which. What
    owners have stepped is gathered in the reverse order, by the same buckets."""

    names: tuple[str, ...]
    calls: tuple[_Call, ...]
    issues: dict[int, list[tuple[int, tuple[int, ...]]]]  # by point: (sum, ranks)
    gathers: tuple[tuple[str, _Call], ...] = ()
    gather_of: Mapping[str, int] = field(default_factory=dict)  # by owned parameter


NO_SUMS = _Sums((), (), {})


def _sums(simulation: Simulation, sums: tuple[GradientSum, ...]) -> _Sums:
    """A rank starts its buckets in their order, each when it is complete."""
    issues: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    alike = simulation.in_sums
    passed: dict[int, int] = {}  # by kind of rank: where it started its last one
    for k, s in enumerate(sums):
        by_point: dict[int, list[int]] = {}
        complete = [
            {kind: point for point, who in simulation.points[p.result] for kind in alike.of(who)}
            for p in s.params
        ]
        for kind in alike.of(s.ranks):
            last = [at.get(kind, AT_THE_END) for at in complete]
            passed[kind] = min(*last, passed.get(kind, last[0]))
            by_point.setdefault(passed[kind], []).append(kind)
        for point, kinds in by_point.items():
            ranks = s.ranks if len(by_point) == 1 else alike.ranks(kinds)
            issues.setdefault(point, []).append((k, ranks))
    members = [[p.result for p in s.params] for s in sums]
    calls = [simulation.call(s.exchange, "gradient") for s in sums]
    gathers, gather_of = [], {}
    for s, names in reversed([*zip(sums, members)]):
        if s.owned is not None:
            gather_of |= dict.fromkeys(names, len(gathers))
            gathers.append((parameters_name(names), simulation.call(s.gather, "gradient")))
    return _Sums(tuple(map(bucket_name, members)), tuple(calls), issues, tuple(gathers), gather_of)


def shown(i: Instruction) -> str:
    return next((r for r in i.results if r is not None), i.op)


# --- one step ---------------------------------------------------------------------------------------------


class _Run:
    """The clocks of one simulated step, by kind of rank."""

    def __init__(
        self, simulation: Simulation, program: Program, sums: _Sums, alike: _Alike, keep_events: bool
    ) -> None:
        self.simulation, self.program, self.keep_events = simulation, program, keep_events
        self.alike, count = alike, len(alike.firsts)
        self.clock = [0.0] * count
        self.busy = [0.0] * count
        self.under_way = [0.0] * count  # until when a collective of the kind is
        self.slowdown = [simulation.slowdown[r] for r in alike.firsts]
        self.slowed = [(k, s) for k, s in enumerate(self.slowdown) if s > 0]
        self.free = [0.0] * len(simulation.channels)  # when each channel is
        self.carrying = [0.0] * len(simulation.channels)  # until when each occupies links
        self.served = [0.0] * len(simulation.links)  # when each link has carried all that it was given
        self.ready: dict[str, tuple[float, _Call]] = {}  # results that nobody has waited for yet
        self.arriving: list[tuple[float, _Call, int, str]] = []  # gradients to be taken in at the end
        self.communication = 0.0
        self.turn_s = 0.0  # when the first rank ends its forward pass
        self.events: list[Event] = []
        self.active = [True] * count  # whether the kind takes this micro-step
        self.gathers, self.gather_of = sums.gathers, sums.gather_of
        self.gathered: list[tuple[float, _Call, set[int]]] = []  # with the kinds that have not awaited it
        self.landed = 0  # how many of them somebody has awaited
        self.fetched = 0  # and how many everybody has
        self.begin(sums)

    def begin(self, sums: _Sums) -> None:
        """The next backward pass makes these sums."""
        self.sums = sums
        self.left = [len(call.exchange.ranks) for call in sums.calls]
        self.issued = [0.0] * len(self.left)
        self.sum_end = [0.0] * len(self.left)

    def micro_steps(
        self, one: Pass, sums: _Sums, active: list[bool], forward_s: Seconds, backward_s: Seconds
    ) -> None:
        """Micro-steps that are alike. Once they take equally long, so do all that follow."""
        self.active = active
        forward_s, backward_s = (
            [np.multiply(row, active) for row in rows] for rows in (forward_s, backward_s)
        )
        before: list[float] = []
        for n in range(one.repeats):
            start = [*self.clock, *self.busy, self.communication]
            self.begin(sums)
            self.micro_step(forward_s, backward_s, is_last=one.is_last)
            took = [b - a for a, b in zip(start, (*self.clock, *self.busy, self.communication))]
            if before and not self.keep_events and np.allclose(took, before, rtol=1e-9, atol=0.0):
                rest = one.repeats - 1 - n
                count = len(self.clock)
                self.clock = [t + rest * d for t, d in zip(self.clock, took)]
                self.busy = [t + rest * d for t, d in zip(self.busy, took[count:])]
                self.communication += rest * took[-1]
                break
            before = took

    def micro_step(self, forward_s: Seconds, backward_s: Seconds, *, is_last: bool = True) -> None:
        """A forward and a backward pass; of the last one the loss is summed."""
        simulation = self.simulation
        self.steps(simulation.forward, simulation.forward_counts, forward_s)
        if self.gathers:
            self.fetch(len(self.gathers) - 1)
        self.turn_s = min(self.clock)
        if is_last and simulation.loss is not None:
            self.start(simulation.loss, LOSS_SUM)
        self.steps(simulation.backward, simulation.backward_counts, backward_s)
        self.end_of_backward(backward_s)

    def start_gathers(self) -> None:
        """Begins to gather what the owners have stepped, no more at a time than the runtime does."""
        under_way = sum(call.exchange.size_bytes for _, call, _ in self.gathered[self.landed :])
        for name, call in self.gathers[len(self.gathered) :]:
            if under_way >= IN_FLIGHT_BYTES:
                break
            kinds = set(self.alike.of(call.exchange.ranks))
            self.gathered.append((self.start(call, name), call, kinds))
            under_way += call.exchange.size_bytes

    def fetch(self, last: int) -> None:
        """Ranks await the gathers up to the ``last``, in order; with each that is there others may start."""
        for n in range(self.fetched, last + 1):
            end, call, waiting = self.gathered[n]
            kinds = [k for k in waiting if self.active[k]]
            for k in kinds:
                self.clock[k] = max(self.clock[k], end)
            waiting.difference_update(kinds)
            self.occupy(call, kinds)
            if n == self.landed:
                self.landed += 1
                self.start_gathers()
            if n == self.fetched and not waiting:
                self.fetched += 1

    def optimizer(self) -> None:
        seconds = self.simulation.sheet.optimizer_s(self.program)
        for kind, rank in enumerate(self.alike.firsts):
            self.compute(kind, "optimizer", seconds[rank])

    def compute(self, kind: int, name: str, seconds: float, op: str = "") -> None:
        start = self.clock[kind]
        end = self.computed(kind, self.slowdown[kind], seconds)
        self.clock[kind] = end
        self.busy[kind] += end - start
        if self.keep_events and seconds > 0:
            self.events.append(Event(self.alike.firsts[kind], "compute", name, start, end, op))

    def computed(self, kind: int, slowdown: float, seconds: float) -> float:
        """When a rank has computed for ``seconds``, slower while a collective of its own is under way."""
        start, until = self.clock[kind], self.under_way[kind]
        if slowdown <= 0 or until <= start:
            return start + seconds
        slow = start + seconds * (1 + slowdown)
        return slow if slow <= until else until + seconds - (until - start) / (1 + slowdown)

    def last(self, ranks: tuple[int, ...]) -> float:
        """When the last of these ranks is there."""
        return max([self.clock[k] for k in self.alike.of(ranks)])

    def occupy(self, call: _Call, kinds: Iterable[int]) -> None:
        """The computing threads' half of a collective."""
        if call.host:
            where = call.exchange.ranks
            for k in kinds:
                self.clock[k] += call.host[where.index(self.alike.firsts[k])]

    def start(self, call: _Call, name: str) -> float:
        """All ranks issue a collective here; returns its end."""
        self.occupy(call, self.alike.of(call.exchange.ranks))
        return self.communicate(call, name, self.last(call.exchange.ranks))

    def communicate(self, call: _Call, name: str, issued: float) -> float:
        """A collective that the last rank has issued; returns its end."""
        channel, exchange = call.channel, call.exchange
        start = max(issued, self.free[channel])
        carrying = start + call.longest
        served = self.served
        for link, seconds in call.links:
            before = served[link]
            served[link] = (before if before > start else start) + seconds
            if call.yields and served[link] > carrying:
                carrying = served[link]
        for other, _ in self.simulation.rivals[channel]:
            if self.carrying[other] > start:
                carrying = max(carrying, self.shared(call, start))
                break
        end = max(start + call.seconds, carrying)
        self.free[channel], self.carrying[channel] = end, carrying
        self.communication += call.seconds
        if self.slowed:
            for k in self.alike.of(exchange.ranks):
                self.under_way[k] = max(self.under_way[k], end)
        if self.keep_events:
            what = (name, start, end, exchange.name, exchange.size_bytes)
            self.events += [Event(r, "communication", *what) for r in exchange.ranks]
        return end

    def shared(self, call: _Call, start: float) -> float:
        """Until when a collective occupies links that others are using."""
        rivals = [
            (self.carrying[other] - start, links)
            for other, links in self.simulation.rivals[call.channel]
            if self.carrying[other] > start
        ]
        return max(
            [
                start + seconds + sum(min(seconds, rest) for rest, links in rivals if link in links)
                for link, seconds in call.links
            ],
            default=start,
        )

    def wait(self, end: float, call: _Call) -> None:
        for k in self.alike.of(call.exchange.ranks):
            if self.clock[k] < end:
                self.clock[k] = end
        self.occupy(call, self.alike.of(call.exchange.ranks))

    def steps(self, steps: list[_Step], counts: np.ndarray, work_s: Seconds) -> None:
        table = np.array(work_s).reshape(len(work_s), len(self.clock))
        rows = iter((counts @ table).tolist())
        for step in steps:
            if step.works:
                self.work(step, next(rows), work_s)
            if step.awaited:
                self.wait(*self.ready.pop(step.awaited))
            elif step.call is not None:
                end = self.start(step.call, step.name)
                if step.value:
                    self.ready[step.value] = (end, step.call)
                if step.taken_in is not None:
                    self.arriving.append((end, step.call, *step.taken_in))
            elif step.used in self.gather_of:
                self.fetch(self.gather_of[step.used])
            elif step.point is not None:
                for k, ranks in self.sums.issues.get(step.point, ()):
                    self.issue(k, ranks)

    def work(self, step: _Step, seconds: list[float], work_s: Seconds) -> None:
        clock, busy = self.clock, self.busy
        if self.keep_events:
            for work, name, op in step.works:
                for kind, s in enumerate(work_s[work]):
                    self.compute(kind, name, s, op)
            return
        slow_ends = [(k, self.computed(k, slowdown, seconds[k])) for k, slowdown in self.slowed]
        for kind, s in enumerate(seconds):
            clock[kind] += s
            busy[kind] += s
        for k, end in slow_ends:
            busy[k] += end - clock[k]
            clock[k] = end

    def issue(self, k: int, ranks: tuple[int, ...]) -> None:
        """These ranks' part in a gradient sum is there."""
        call = self.sums.calls[k]
        self.occupy(call, self.alike.of(ranks))
        self.issued[k] = max(self.issued[k], self.last(ranks))
        self.left[k] -= len(ranks)
        if not self.left[k]:
            self.sum_end[k] = self.communicate(call, self.sums.names[k], self.issued[k])

    def end_of_backward(self, work_s: Seconds) -> None:
        """What is left is issued; then every rank takes in what arrives, and waits for its sums."""
        for k, ranks in self.sums.issues.get(AT_THE_END, ()):
            self.issue(k, ranks)
        for end, call, work, name in self.arriving:
            self.wait(end, call)
            if work >= 0:
                for kind in self.alike.of(call.exchange.ranks):
                    self.compute(kind, name, work_s[work][kind], "aten.mm")
        self.arriving.clear()
        for end, call in zip(self.sum_end, self.sums.calls):
            self.wait(end, call)
        for (_, ranks), channel in self.simulation.channels.items():
            end = self.free[channel]
            if end > 0:
                end = max([end, *(self.served[link] for link in self.simulation.crossed[channel])])
            for k in self.alike.of(ranks):
                if self.active[k]:
                    self.clock[k] = max(self.clock[k], end)
