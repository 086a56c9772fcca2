"""From a graph and a cluster to a plan: every planner proposes programs, the simulator disposes.

propose     candidates of the asked planner, or of all of them for ``auto``
bucket      gradient buckets of several sizes for each
polish      shares moved by whole samples while the simulated step gets shorter
choose      the fastest that fits in every device's memory
"""

from __future__ import annotations

import difflib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from .algorithms import with_algorithms
from .baselines import (
    data_parallel,
    device_seconds,
    fully_sharded,
    only,
    proportional_ratio,
    tensor_parallel,
)
from .buckets import bucketed
from .cluster import Cluster
from .cost import CostModel, Profile
from .cost.gaps import gaps
from .cost.placed import Sheet, exchange_of, is_computation
from .errors import Infeasible, InputError
from .factors import best_factors
from .ir import Graph, Program, Ratio, even_ratio, local_bytes, local_shape, make_ratio, shard_sizes, support
from .plan_file import Candidate, Plan
from .ratios import optimal_ratio, usable_bytes, with_ratio
from .rules import RULES
from .simulator import Simulation, Timeline
from .synthesis import Choices, NoProgram, Prices, Problem, emit, search
from .units import size_text

BASELINES = ("single", "ddp-even", "ddp-proportional", "fsdp-even")
PLANNERS = ("auto", "hap", *BASELINES, "tensor-parallel")
HEADROOM = 0.05  # of a device's memory that a plan leaves free
BUCKET_BYTES = (1e6, 4e6, 16e6, 64e6)
GRADIENT_PRICES = (0.0, 1.0, 0.3)  # of a second of gradient communication: all, none, much of it hidden
WEIGHT = 1.01  # the search may return a program this much dearer than the cheapest
MAX_STATES = 200  # and two per step, before it keeps only the best few of every step
MAX_ROUNDS = 4
MAX_POLISH = 64
SAME_RATIO = 0.01  # ratios that differ by less lead to the same program
LOST = 1.01  # times the best step: a program that cannot get below it is not looked into
SPARE = (0.0, 0.03, 0.1)  # of a device's memory, left to rounding


@dataclass(frozen=True)
class Proposal:
    """A program of one planner, with what the simulator says of it."""

    planner: str
    program: Program
    timeline: Timeline
    feasible: bool
    simulation: Simulation = field(compare=False, repr=False)
    gap: float | None = None  # how much dearer than the cheapest the search may have left it

    @property
    def key(self) -> tuple[bool, float]:
        return (not self.feasible, self.timeline.step_s)


@dataclass
class Tried:
    """What was tried on a set of devices: programs, by number and shape; the first one at each price; what
    their steps do not go below where sums of gradients are free."""

    seen: set[int] = field(default_factory=set)
    by_price: dict[float, int] = field(default_factory=dict)
    floors_s: list[float] = field(default_factory=list)

    @property
    def same_at_both_ends(self) -> bool:
        return len(self.by_price) == 2 and len(set(self.by_price.values())) == 1


class Traced(Protocol):
    """A traced model: what ``mixmesh.trace.trace`` returns."""

    @property
    def graph(self) -> Graph: ...
    @property
    def output_has_loss(self) -> bool: ...


def make_plan(
    traced: Traced | Graph,
    cluster: Cluster,
    *,
    planner: str = "auto",
    profile: Profile | None = None,
    optimizer_states: int = 2,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best plan that ``planner`` finds. ``optimizer_states`` is tensors per parameter (Adam: 2).

    Raises InputError for an unknown planner or a batch smaller than the number of devices, Infeasible
    if nothing fits.
    """
    if planner not in PLANNERS:
        close = difflib.get_close_matches(planner, PLANNERS, 1)
        raise InputError(
            f"unknown planner {planner!r}",
            expected=", ".join(PLANNERS),
            hint=f"--planner {close[0]}" if close else "",
        )
    with untouched():
        return _make_plan(traced, cluster, planner, profile, optimizer_states, progress)


@contextmanager
def untouched() -> Iterator[None]:
    """Keeps the garbage collector from looking again and again through what was there before, such as a
    whole PyTorch: it took half of the time of planning."""
    if gc.get_freeze_count():
        yield  # somebody else did
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _make_plan(
    traced: Traced | Graph,
    cluster: Cluster,
    planner: str,
    profile: Profile | None,
    optimizer_states: int,
    progress: Callable[[str], None] | None,
) -> Plan:
    graph = traced if isinstance(traced, Graph) else traced.graph
    started = time.perf_counter()
    task = Task(graph, CostModel(cluster, profile), optimizer_states, progress or (lambda _: None))
    check_batch(graph, cluster)
    names = (*BASELINES, "hap") if planner == "auto" else (planner,)
    best: dict[str, Proposal] = {}
    for name in names:
        task.progress(f"planning: {name}")
        proposals = list(task.propose(name))
        if proposals:
            best[name] = min(proposals, key=lambda p: p.key)
    fitting = [p for p in best.values() if p.feasible]
    if not fitting:
        raise infeasible(task, list(best.values()))
    chosen = min(fitting, key=lambda p: p.key)
    candidates = sorted(best.values(), key=lambda p: p.key)
    program = with_algorithms(chosen.program, task.costs)
    return Plan(
        program=program,
        planner=chosen.planner,
        predicted_step_s=chosen.timeline.step_s,
        predicted_peak_memory_bytes=chosen.timeline.peak_memory_bytes,
        cluster_fingerprint=cluster.fingerprint,
        cluster_name=cluster.name,
        graph_fingerprint=graph.fingerprint,
        output_has_loss=False if isinstance(traced, Graph) else traced.output_has_loss,
        planning_s=time.perf_counter() - started,
        states_expanded=task.states_expanded,
        timings_s=dict(task.timings_s),
        gap=chosen.gap,
        cost_source=task.costs.source,
        candidates=tuple(Candidate(p.planner, p.feasible, p.timeline.step_s) for p in candidates),
        warnings=(*warnings_of(graph, program), *gaps(program, task.costs)),
        notes=notes_of(program, chosen.simulation.sheet),
    )


def check_batch(graph: Graph, cluster: Cluster) -> None:
    sizes = {i.types[0].shape[0] for i in graph.batch_inputs if i.types[0].shape}
    if sizes and max(sizes) < cluster.world_size:
        raise InputError(
            "the batch is smaller than the number of devices",
            expected=f"at least {cluster.world_size} samples, one for each device of {cluster.name!r}",
            got=f"{max(sizes)} samples in dim 0 of the batch",
            hint="a larger global batch in the job, or a cluster file with fewer devices",
        )


class Task:
    """One planning task: proposes candidates and has them simulated."""

    def __init__(self, graph: Graph, costs: CostModel, optimizer_states: int, progress) -> None:
        self.graph, self.costs, self.optimizer_states = graph, costs, optimizer_states
        self.progress = progress
        self.timings_s: dict[str, float] = {}
        self._inner_s: list[float] = []
        with self.timed("search"):
            self.choices = Choices(graph, costs, RULES)
        self.units = self.choices.units
        self.world_size = costs.cluster.world_size
        self.states_expanded = 0
        self.best_s = float("inf")  # of all that fits so far
        self._data_parallel: dict[Ratio, Program] = {}
        self._simulations: dict[int, tuple[Program, Simulation]] = {}  # by identity, which is kept alive

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Adds the seconds spent inside to a step of planning, less those of steps inside it."""
        started = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.timings_s[step] = self.timings_s.get(step, 0.0) + spent - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += spent

    @cached_property
    def proportional(self) -> Ratio:
        return proportional_ratio(self.graph, self.costs, self.choices)

    @cached_property
    def batch(self) -> int:
        """Samples in the global batch: the grain of the shares (1000 if no input has a batch)."""
        sizes = [i.types[0].shape[0] for i in self.graph.batch_inputs if i.types[0].shape]
        return max(sizes, default=1000)

    def propose(self, planner: str) -> Iterator[Proposal]:
        match planner:
            case "single":
                seconds = device_seconds(self.graph, self.costs, choices=self.choices)
                # the fastest device, and the fastest with the most memory if that one is too small
                for rank in dict.fromkeys(
                    (
                        min(range(self.world_size), key=seconds.__getitem__),
                        max(range(self.world_size), key=lambda r: (self.memory(r), -seconds[r])),
                    )
                ):
                    yield self.judge(planner, self.data_parallel(only(rank, self.world_size)))
            case "ddp-even":
                yield self.best_buckets(planner, self.data_parallel(even_ratio(self.world_size)))
            case "ddp-proportional":
                yield self.best_buckets(planner, self.data_parallel(self.proportional))
            case "fsdp-even":
                yield self.judge(planner, fully_sharded(self.data_parallel(even_ratio(self.world_size))))
            case "tensor-parallel":
                made = tensor_parallel(self.graph, self.costs, self.proportional, self.units, self.choices)
                yield self.best_buckets(planner, made)
            case "hap":
                yield from self.synthesised()

    def memory(self, rank: int) -> int:
        return self.costs.cluster.devices[rank].memory_bytes

    def data_parallel(self, ratio: Ratio) -> Program:
        if ratio not in self._data_parallel:
            with self.timed("search"):
                made = data_parallel(self.graph, self.costs, ratio, self.units, self.choices)
            self._data_parallel[ratio] = made
        return self._data_parallel[ratio]

    def judge(
        self, planner: str, program: Program, simulation: Simulation | None = None, step: str = "simulate"
    ) -> Proposal:
        simulation = simulation or self.simulation(program)
        with self.timed(step):
            timeline = simulation.run(program)
        fits = all(
            peak <= usable_bytes(self.costs, rank, HEADROOM)
            for rank, peak in enumerate(timeline.peak_memory_bytes)
        )
        if fits:
            self.best_s = min(self.best_s, timeline.step_s)
        return Proposal(planner, program, timeline, fits, simulation)

    def best_buckets(self, planner: str, program: Program, simulation: Simulation | None = None) -> Proposal:
        simulation = simulation or self.simulation(program)
        with self.timed("simulate"):
            variants = sorted(bucketed(program, BUCKET_BYTES), key=simulation.step_s)
        # the fastest that fits; the memory of those behind it need not be known
        judged = []
        for variant in variants:
            judged.append(self.judge(planner, variant, simulation))
            if judged[-1].feasible:
                break
        return min(judged, key=lambda p: p.key)

    def simulation(self, program: Program) -> Simulation:
        """One for each program, whatever its ratio; the first ones are asked for again."""
        key = id(program.instructions)
        if key not in self._simulations:
            with self.timed("simulate"):
                made = Simulation(program, self.costs, self.optimizer_states)
            self._simulations[key] = (program, made)
        return self._simulations[key][1]

    def synthesised(self) -> Iterator[Proposal]:
        """HAP: program and ratio in turn, for several prices and sets of devices; first the set that data
        parallelism leaves most to hope for, as what cannot become faster than the best is left out."""
        fastest_first = sorted(range(self.world_size), key=lambda r: -self.proportional[r])
        sets = list(device_sets(fastest_first, self.costs.class_of))
        hopeful = [(self.least_s(ranks), -len(ranks), ranks) for needed, ranks in sets if needed]
        in_need = [(0.0, 0, ranks) for needed, ranks in sets if not needed]
        proposed = False
        for _, _, ranks in (*sorted(hopeful), *in_need):
            known = self.best_s < float("inf")
            if proposed and (
                self.least_seconds(ranks) >= self.best_s or (known and (0.0, 0, ranks) in in_need)
            ):
                continue  # even with free communication these devices are too slow together
            tried = Tried()
            for price in (None, *GRADIENT_PRICES):
                if len(ranks) == 1 and price is not None:
                    continue  # nothing to communicate
                if price is not None and tried.same_at_both_ends:
                    continue  # the cheapest program at both ends is the cheapest in between
                if proposed and 0.0 in tried.by_price and min(tried.floors_s) > LOST * self.best_s:
                    break  # gradients for nothing would not help these devices, nor will any other price
                what = "data parallel" if price is None else f"gradient price {price:g}"
                self.progress(f"planning: hap, {len(ranks)} devices, {what}")
                for proposal in self.alternate(ranks, price, tried, judged=not proposed):
                    proposed = True
                    yield proposal

    def least_s(self, ranks: tuple[int, ...]) -> float:
        """The least step of data parallelism on these devices."""
        return self.bounds(self.data_parallel(self.shares(ranks)), ranks)[1]

    def shares(self, ranks: tuple[int, ...]) -> Ratio:
        return make_ratio([s if r in ranks else 0.0 for r, s in enumerate(self.proportional)])

    def least_seconds(self, ranks: tuple[int, ...]) -> float:
        """No plan on these devices is faster: all of the work at their summed speed."""
        seconds = device_seconds(self.graph, self.costs, 1 / len(ranks), self.choices)
        return 1 / sum(1 / (seconds[r] * len(ranks)) for r in ranks)

    def find(
        self, ratio: Ratio, price: float | None, seen: set[int]
    ) -> tuple[Program | None, int, float | None]:
        """The cheapest program under a ratio, with a number that tells it from others and its gap; no
        program if it is one of ``seen``. Without a price for gradients it is that of data parallelism."""
        if price is None:
            if 0 in seen:
                return None, 0, None
            program = self.data_parallel(ratio)
            seen.add(shape_of(program))
            return program, 0, None
        with self.timed("search"):
            problem = Problem(
                self.graph,
                self.costs,
                ratio,
                prices=Prices(gradient_sync=price),
                optimizer_states=self.optimizer_states,
                choices=self.choices,
            )
            try:
                found = search(problem, weight=WEIGHT, max_states=MAX_STATES + 2 * len(problem.steps))
            except NoProgram:
                return None, 0, None
            self.states_expanded += found.states_expanded
            number = hash(tuple((m.option.needs, m.option.gives, m.loads) for m in found.moves))
            if number in seen:
                return None, number, found.gap
            program = emit(problem, found)
            shape = shape_of(program)
            known = shape in seen
            seen.update((number, shape))
            return None if known else program, number, found.gap

    def alternate(
        self, ranks: tuple[int, ...], price: float | None, tried: Tried, judged: bool
    ) -> Iterator[Proposal]:
        """Q = argmin t(., B), B = argmin t(Q, .), until nothing is gained; the best pair, polished.

        ``tried`` is what was tried on these ranks before. What cannot become the fastest is left out unless
        it is to be ``judged`` in any case.
        """
        ratio = self.shares(ranks)
        best: Proposal | None = None
        for turn in range(MAX_ROUNDS):
            program, number, gap = self.find(ratio, price, tried.seen)
            if turn == 0 and price is not None:
                tried.by_price[price] = number
            if program is None:
                break  # another price or ratio led to the same program
            tried.seen.add(number)
            simulation = self.simulation(program)
            floor_s, least_s = self.bounds(program, ranks)
            tried.floors_s.append(floor_s)
            if not judged and least_s > LOST * self.best_s:
                break
            better = self.ratio(simulation, program, ranks)
            made = self.best_buckets("hap", with_ratio(program, "r0", better or ratio), simulation)
            made = replace(made, gap=gap)
            if not made.feasible:
                yield from self.stored_sharded(program, ranks)
            if best is None or made.key < best.key:
                best = made
            else:
                break
            if better is None or max(abs(a - b) for a, b in zip(ratio, better)) < SAME_RATIO:
                break
            ratio = better
        if best is not None:
            yield self.polish(self.factored(best, ranks))

    def bounds(self, program: Program, ranks: tuple[int, ...]) -> tuple[float, float]:
        """What a program's step does not go below with as much memory as it likes, if nothing is summed, and
        whatever the buckets."""
        simulation = self.simulation(program)
        ratio = self.ratio(simulation, program, ranks, limited=False) or program.ratio_of["r0"]
        with self.timed("simulate"):
            return simulation.least_s(with_ratio(program, "r0", ratio))

    def factored(self, proposal: Proposal, ranks: tuple[int, ...]) -> Proposal:
        """The proposal with those weight gradients computed from gathered factors that are faster so."""

        def judge(program: Program) -> tuple[bool, float]:
            return self.best_buckets(proposal.planner, program).key

        made = best_factors(proposal.program, self.costs, judge)
        if made is None:
            return proposal
        simulation = self.simulation(made)
        better = self.ratio(simulation, made, ranks) or proposal.program.ratio_of["r0"]
        with_better = self.best_buckets(proposal.planner, with_ratio(made, "r0", better), simulation)
        candidates = (proposal, self.best_buckets(proposal.planner, made, simulation), with_better)
        return replace(min(candidates, key=lambda p: p.key), gap=proposal.gap)

    def ratio(
        self,
        simulation: Simulation,
        program: Program,
        ranks: tuple[int, ...],
        headroom: float = HEADROOM,
        *,
        limited: bool = True,
    ) -> Ratio | None:
        """The best shares of ``ranks`` for a program and its simulation; None if they cannot all fit."""
        if len(ranks) == 1:
            return program.ratio_of["r0"]
        try:
            with self.timed("ratios"):
                ratio = optimal_ratio(
                    program,
                    self.costs,
                    ranks,
                    optimizer_states=self.optimizer_states,
                    headroom=headroom,
                    sheet=simulation.sheet,
                    memory=simulation.memory,
                    limited=limited,
                )
        except Infeasible:
            return None
        if support(ratio) != ranks:
            # the LP left a device out: that is another set of devices, tried on its own
            ratio = make_ratio([max(s, 1 / self.batch) if r in ranks else 0 for r, s in enumerate(ratio)])
        return ratio

    def stored_sharded(self, program: Program, ranks: tuple[int, ...]) -> Iterator[Proposal]:
        """The same program with parameters stored in shards: for devices that cannot hold all of them.

        Shards are whole rows and samples, so that the shares of the LP are rounded; where that oversteps
        a memory, the LP is asked to leave a little more.
        """
        if len(ranks) == 1:
            return
        sharded = fully_sharded(program)
        simulation = self.simulation(sharded)
        for spare in SPARE:
            ratio = self.ratio(simulation, sharded, ranks, HEADROOM + spare)
            if ratio is None:
                return
            made = self.judge("hap", with_ratio(sharded, "r0", ratio), simulation)
            if made.feasible or spare == SPARE[-1]:
                yield self.polish(made)
                return

    def polish(self, proposal: Proposal) -> Proposal:
        """Moves single samples between ranks while that shortens the simulated step."""
        ranks = support(proposal.program.ratio_of["r0"])
        if len(ranks) < 2 or not proposal.feasible:
            return proposal
        simulation = proposal.simulation

        def at(counts) -> Program:
            return with_ratio(proposal.program, "r0", make_ratio(counts))

        def judge(program: Program) -> Proposal:
            made = self.judge(proposal.planner, program, simulation, step="polish")
            return replace(made, gap=proposal.gap)

        counts = list(whole_counts(proposal.program.ratio_of["r0"], self.batch))
        best = judge(at(counts))
        if proposal.key < best.key:
            best = proposal
        for _ in range(MAX_POLISH):
            # take from whoever computes longest, give to whoever is done first
            load = best.timeline.compute_s
            givers = sorted((r for r in ranks if counts[r] > 1), key=lambda r: -load[r])[:2]
            takers = sorted(ranks, key=lambda r: load[r])[:3]
            moves = []
            for giver in givers:
                for taker in takers:
                    if giver != taker:
                        moved = list(counts)
                        moved[giver] -= 1
                        moved[taker] += 1
                        with self.timed("polish"):
                            moves.append((simulation.step_s(at(moved)), moved))
            found = None
            for step_s, moved in sorted(moves):
                if best.feasible and step_s >= best.timeline.step_s:
                    break
                candidate = judge(at(moved))
                if candidate.key < best.key:
                    found = candidate, moved
                    break
            if found is None:
                break
            best, counts = found
        return best


def shape_of(program: Program) -> int:
    """A number that tells a program from those with other placements."""
    return hash(tuple((i.op, i.types) for i in program.instructions))


def whole_counts(ratio: Ratio, total: int) -> tuple[int, ...]:
    """Whole samples per rank, at least one for every rank that takes part."""
    counts = list(shard_sizes(total, ratio))
    for rank in support(ratio):
        while counts[rank] == 0:
            counts[max(range(len(counts)), key=counts.__getitem__)] -= 1
            counts[rank] += 1
    return tuple(counts)


def device_sets(
    fastest_first: list[int], class_of: tuple[int, ...]
) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """All devices, then without the slowest class, without the two slowest, …: dropping is always legal.
    Last, and only to be tried where nothing else fits, without any other one class: its memory may be the
    one that is too small. With each set, whether it is to be tried in any case."""
    order = list(dict.fromkeys(class_of[r] for r in fastest_first))
    kept = [(True, order[:count]) for count in range(len(order), 0, -1)]
    kept += [(False, order[:n] + order[n + 1 :]) for n in range(len(order) - 1)]
    for needed, keep in kept:
        yield needed, tuple(sorted(r for r in fastest_first if class_of[r] in keep))


def infeasible(task: Task, proposals: list[Proposal]) -> Infeasible:
    """Why nothing fits, from the candidate that comes closest."""

    def excess(p: Proposal) -> tuple[float, int]:
        over = [
            (peak - usable_bytes(task.costs, rank, HEADROOM), rank)
            for rank, peak in enumerate(p.timeline.peak_memory_bytes)
        ]
        return max(over)

    closest = min(proposals, key=lambda p: excess(p)[0])
    over, rank = excess(closest)
    device = task.costs.cluster.devices[rank]
    peak = closest.timeline.peak_memory_bytes[rank]
    name, size = largest_tensor(closest.program, rank)
    return Infeasible(
        "no plan fits in memory",
        expected=f"at most {size_text(usable_bytes(task.costs, rank, HEADROOM))} usable on rank {rank} "
        f"({device.name})",
        got=f"{size_text(peak)} needed there by {closest.planner}, the candidate that comes closest; "
        f"{size_text(task.costs.memory_constant_bytes(rank))} of it are the process itself; largest tensor "
        f"%{name}, {size_text(size)}",
        hint=(
            "a smaller global batch in the job",
            f"a device with at least {size_text(over)} more memory",
        ),
    )


def largest_tensor(program: Program, rank: int) -> tuple[str, int]:
    sizes = {
        name: local_bytes(t.value, t.placement, program.ratio(t.ratio), rank)
        for name, t in program.types.items()
    }
    name = max(sizes, key=sizes.__getitem__)
    return name, sizes[name]


def warnings_of(graph: Graph, program: Program) -> Iterator[str]:
    seen: set[str] = set()
    for node in graph.nodes:
        if node.is_leaf or node.op == "update" or node.op in RULES or node.op in seen:
            continue
        seen.add(node.op)
        place = f" ({node.location}{', ' + node.source if node.source else ''})" if node.location else ""
        yield f"no sharding rule for {node.op}{place}; it runs replicated on every device"
    ratio = program.ratios[0][1]
    idle = [r for r, share in enumerate(ratio) if share == 0]
    if idle:
        yield f"ranks {idle} take no part: the step is faster without them"


def notes_of(program: Program, sheet: Sheet) -> dict[int, str]:
    """Comments for the printed program: local sizes of inputs, times of operators and collectives."""
    costs, notes = sheet.costs, {}
    slowest: dict[int, float] = {}  # by work
    for n, i in enumerate(program.instructions):
        if i.op == "input":
            shapes = [
                local_shape(i.type.value, i.type.placement, program.ratio(i.type.ratio), r)
                for r in range(program.world_size)
            ]
            notes[n] = "local " + " ".join(str(s[0]) if s else "-" for s in shapes)
        elif is_computation(i):
            work = sheet.works[sheet.work_of[n]]
            if sheet.work_of[n] not in slowest:
                shares = {
                    (costs.class_of[r], share)
                    for r, share in enumerate(sheet.shares(work.cut, program))
                    if share
                }
                slowest[sheet.work_of[n]] = max(
                    (work.times[c].forward.at(share) for c, share in shares), default=0.0
                )
            if slowest[sheet.work_of[n]] >= 5e-6:
                notes[n] = f"{slowest[sheet.work_of[n]] * 1e3:8.3f} ms"
        else:
            exchange = exchange_of(program, i)
            if exchange is not None:
                notes[n] = f"{exchange.seconds(costs) * 1e3:8.3f} ms"
    return notes
