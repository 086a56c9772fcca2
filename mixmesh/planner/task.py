"""The planning context: all planners of a task use it to make, simulate and judge programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from ..base.lazy import lazy
from ..cluster.device import HEADROOM
from ..cost import CostModel
from ..cost.direct import best_direct_bytes
from ..cost.levels import best_levels
from ..cost.placed import supports
from ..errors import Infeasible
from ..lang.ir import (
    Body,
    Buckets,
    Graph,
    Levels,
    Program,
    Ratio,
    Shard,
    batch_norm_of,
    batch_size_of,
    is_even,
    lonely_norms,
    make_ratio,
    owned_type,
    ratio_of_speeds,
    support,
)
from ..lang.ir.dtypes import dtype_conflicts, half_dtypes
from ..lang.ir.local_norms import LOCAL
from ..lang.optimizer_states import OptimizerStates
from ..lang.rules import RULES, Units
from ..passes.buckets import bucketings, numbered
from ..passes.order import coalesced, levels_of_sums, most_saved_s
from ..search.baselines import data_parallel, device_seconds
from ..search.ratios import optimal_ratio, usable_bytes
from ..search.synthesis import Choices, Found, Problem, emit
from ..simulator import MicroBatches, Simulation, Timeline
from .budget import AMPLE, CARE_STEPS, EACH, Budget
from .ideal import ideal_s, seconds_by_class
from .proposal import BASELINES, Proposal, ranks_of
from .tried import Tried

USUAL_BYTES, SMALLER_BYTES, LARGER_BYTES = 16e6, (4e6, 1e6), (64e6,)  # sizes of buckets that are tried
# a program slower by at most this factor may become the best after choosing sums, order and buckets
HOPEFUL = 1.15
# rough largest gain by reducing gradients to owners, as a share of the step with free sums: gathers hide
# behind the next forward pass
HIDDEN = 0.5
MUCH = 0.1  # share of the step that packed sums must save while programs are searched


@dataclass
class Progress:
    """State that changes, shared by a task and its views on some of its ranks."""

    best_s: float = float("inf")
    states_expanded: int = 0


class Task:
    """A graph on a cluster: makes each program once, simulates it once, and judges all by one measure."""

    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        optimizer_states: OptimizerStates,
        progress,
        budget: Budget = AMPLE,
        whole_parameters: bool = False,
    ) -> None:
        self.graph, self.costs, self.optimizer_states = graph, costs, optimizer_states
        self.progress, self.budget = progress, budget
        self.whole_parameters = whole_parameters  # whether the optimizer cannot step a part of a parameter
        self.timings_s: dict[str, float] = {}
        self.pass_s: dict[str, float] = {}  # seconds spent, by the name of a pass
        self._inner_s: list[float] = []
        self.world_size = costs.cluster.world_size
        self.ranks = tuple(range(self.world_size))  # the ranks that may take part
        self._seconds_among: dict[int, tuple[float, ...]] = {}  # by number of devices
        # by ranks, so that all views of a task may share them
        self._shares: dict[tuple[int, ...], Ratio] = {}
        self._bounds_s: dict[tuple[int, ...], float] = {}
        self._ideals_s: dict[tuple[int, ...], float] = {}
        self._progress = Progress()
        self._all_levels: tuple[Levels | None, ...] = ()  # only the given levels, if any
        self._levels: dict[tuple[int, ...], Levels | None] = {}  # by ranks
        self.proposed: dict[str, Proposal] = {}  # for each planner that was asked, its best proposal
        self.kinds: dict[tuple, Proposal] | None = None  # if finalists are asked for, the best of each kind
        able = tuple(d.supports_bf16 or d.kind == "cpu" for d in costs.cluster.devices)
        self.dtypes = half_dtypes(graph, able)
        self._agreeing: dict[tuple[Body, tuple], bool] = {}
        self.tried: dict[tuple[int, ...], Tried] = {}  # by devices
        self.summed: set[tuple] = set()  # keys of programs whose gradients are summed in the best way
        self.refused = ""  # reason why a planner has no proposal
        # by whether there is only one rank: the path and its program
        self._data_parallel: dict[bool, tuple[Found, Program]] = {}
        self.searched: dict[int, tuple[Problem, Found]] = {}  # by the shape of the program
        self._programs: dict[tuple[bool, int], Program] = {}
        self._packed: dict[Body, tuple[Program | None, float]] = {}
        self._made: dict[tuple, Program] = {}
        self._simulations: dict[tuple[Body, tuple, tuple[bool, int, bool]], Simulation] = {}
        # by the largest size of one-shot sums, the number of computations, and whether pieces are even
        self._same_but_owners: dict[tuple[int, int, bool], list[Simulation]] = {}
        self._first: dict[tuple[Body, tuple[bool, ...], tuple[bool, int, bool]], Simulation] = {}

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """A context that adds its seconds to a phase of planning, without those of phases inside it."""
        started = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.timings_s[step] = self.timings_s.get(step, 0.0) + spent - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += spent

    def on(self, ranks: tuple[int, ...]) -> Task:
        """The same task for some of its ranks; both share the results that are remembered."""
        if ranks == self.ranks:
            return self
        self.choices, self.seconds_by_class, self.peak_seconds_by_class  # noqa: B018 - the copy has them too
        twin = copy(self)
        twin.ranks, twin.proposed, twin.tried = ranks, {}, {}
        return twin

    def record(self, proposals: Iterable[Proposal]) -> None:
        """Keeps the best proposal of each planner, of these and of the earlier ones."""
        for proposal in proposals:
            earlier = self.proposed.get(proposal.planner, proposal)
            self.proposed[proposal.planner] = min(proposal, earlier, key=lambda p: p.key)

    @property
    def best_s(self) -> float:
        """Seconds of the fastest step so far that fits."""
        return self._progress.best_s

    @best_s.setter
    def best_s(self, seconds: float) -> None:
        self._progress.best_s = seconds

    @property
    def states_expanded(self) -> int:
        """The number of states that all searches have expanded so far."""
        return self._progress.states_expanded

    @states_expanded.setter
    def states_expanded(self, count: int) -> None:
        self._progress.states_expanded = count

    @lazy
    def choices(self) -> Choices:
        with self.timed("search"):
            return Choices(self.graph, self.costs, RULES)

    @property
    def units(self) -> Units:
        return self.choices.units

    @property
    def proportional(self) -> Ratio:
        return self.shares(self.ranks)

    @property
    def bound_s(self) -> float:
        """Seconds of a step that no plan is faster than: measured, or else at the devices' peaks."""
        if self.ranks not in self._bounds_s:
            seconds = self.peak_seconds_by_class
            self._bounds_s[self.ranks] = ideal_s(seconds, self.costs.class_of, self.ranks)
        return self._bounds_s[self.ranks]

    @property
    def ideal_s(self) -> float:
        """Seconds of a step in which all devices compute all the time, according to the cost model: a bound
        for every simulated step."""
        if self.ranks not in self._ideals_s:
            seconds = self.seconds_by_class
            self._ideals_s[self.ranks] = ideal_s(seconds, self.costs.class_of, self.ranks)
        return self._ideals_s[self.ranks]

    @lazy
    def peak_seconds_by_class(self) -> np.ndarray:
        """The least seconds that each class of devices takes for the whole of everything that a step
        computes."""
        return seconds_by_class(self.choices, self.optimizer_states)

    @lazy
    def seconds_by_class(self) -> np.ndarray:
        """The estimated seconds that each class of devices takes for the whole of everything that a step
        computes."""
        return seconds_by_class(self.choices, self.optimizer_states, at_peaks=False)

    @property
    def levels(self) -> Levels | None:
        """The levels for summing gradients if hierarchical sums are faster than flat ones, else None."""
        return self.levels_on(self.ranks)

    @levels.setter
    def levels(self, levels: Levels | None) -> None:
        """Sets the levels for the sums of all programs, whatever their ranks."""
        self._all_levels = (levels,)

    def levels_on(self, ranks: tuple[int, ...]) -> Levels | None:
        """The levels for sums between some ranks."""
        if self._all_levels:
            return self._all_levels[0]
        if ranks not in self._levels:
            self._levels[ranks] = best_levels(self.costs, ranks)
        return self._levels[ranks]

    @lazy
    def direct_bytes(self) -> int:
        """The largest value, in bytes, for which a one-shot all-reduce is faster."""
        return best_direct_bytes(self.costs)

    def in_our_sums(self, planner: str, program: Program) -> Program:
        """The program with hierarchical gradient sums and one-shot sums of small values. Baselines leave all
        sums to the library, as other frameworks do."""
        usual = planner in BASELINES
        levels, most = (None, 0) if usual else (self.levels_on(ranks_of(program)), self.direct_bytes)
        if (program.levels, program.direct_bytes) == (levels, most):
            return program
        return program.changed(levels=levels, direct_bytes=most)

    @lazy
    def has_local_norms(self) -> bool:
        """Whether batch norm takes each rank's own statistics."""
        return batch_norm_of(self.graph) == LOCAL

    @lazy
    def batch(self) -> int:
        """Samples in the global batch, in which shares are counted (1000 if no input has a batch)."""
        return batch_size_of(n.types[0] for n in self.graph.batch_inputs) or 1000

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients of a replicated model."""
        return self.choices.fold.whole.trained_bytes

    @lazy
    def usable_bytes(self) -> tuple[float, ...]:
        """Bytes of every rank's memory that a plan may fill."""
        return tuple(usable_bytes(self.costs, rank, HEADROOM) for rank in range(self.world_size))

    def has_room(self, timeline: Timeline) -> bool:
        """Whether the memory of every rank holds the peaks of a timeline; it does if there are none."""
        return all(a <= b for a, b in zip(timeline.peak_memory_bytes, self.usable_bytes))

    def memory(self, rank: int) -> int:
        return self.costs.cluster.devices[rank].memory_bytes

    def data_parallel(self, ratio: Ratio) -> Program:
        """The data-parallel program, the same for all shares, except that on a single rank it converts
        nothing."""
        alone = len(support(ratio)) == 1
        if alone not in self._data_parallel:

            def spell(problem: Problem, found: Found) -> Program:
                program = self.spell(problem, found)
                self._data_parallel[alone] = found, program
                return program

            with self.timed("search"):
                data_parallel(self.graph, self.costs, ratio, self.units, self.choices, spell)
        return self._data_parallel[alone][1].with_shares(ratio)

    def data_parallel_path(self, *, alone: bool) -> Found | None:
        """The data-parallel path for several ranks, or for one (``alone``), if it was already asked for."""
        path = self._data_parallel.get(alone)
        return None if path is None else path[0]

    def spell(self, problem: Problem, found: Found) -> Program:
        """The program of a path. It has the same instructions for all ratios, except that on a single rank it
        converts nothing. All types name the ratio (see ``without_needless_names``)."""
        key = (len(support(problem.ratio)) == 1, found.number)
        if key not in self._programs:
            self._programs[key] = emit(problem, found, named=True)
        return self._programs[key].with_shares(problem.ratio)

    def made_once(self, make: Callable[..., Program], program: Program, *args) -> Program:
        """Returns ``make(program, *args)``. It is made only once for all programs of the same instructions,
        so that the results share a simulation. Ratios that ``make`` adds keep their first shares."""
        key = make, program.body, args
        if key not in self._made:
            self._made[key] = make(program, *args)
        made = self._made[key]
        ratios = (*program.ratios, *made.ratios[len(program.ratios) :])
        return made.changed(ratios=ratios, levels=program.levels, direct_bytes=program.direct_bytes)

    def packed(self, program: Program) -> Program:
        """The program with the small sums of a level packed, if that saves much of the step; for smaller
        savings another order of the program may do as well (``ordered``)."""
        if program.body not in self._packed:
            groups = levels_of_sums(program, self.costs)
            grouped = coalesced(program, groups) if groups else None
            self._packed[program.body] = grouped, most_saved_s(program, self.costs, groups)
        grouped, most_s = self._packed[program.body]
        if grouped is None or most_s < MUCH * (apart_s := self.usual_s("hap", program)):
            return program
        grouped = grouped.changed(
            ratios=program.ratios, levels=program.levels, direct_bytes=program.direct_bytes
        )
        return grouped if self.usual_s("hap", grouped) < apart_s * (1 - MUCH) else program

    def shares(self, ranks: tuple[int, ...]) -> Ratio:
        """Shares in proportion to the speed of some devices, as if there were no others."""
        if ranks not in self._shares:
            self._shares[ranks] = ratio_of_speeds(self.seconds_among(len(ranks)), ranks)
        return self._shares[ranks]

    def seconds_among(self, num_devices: int) -> tuple[float, ...]:
        """For each rank, the seconds of an equal share of the work on ``num_devices`` devices."""
        if num_devices not in self._seconds_among:
            share = 1 / num_devices
            self._seconds_among[num_devices] = device_seconds(self.graph, self.costs, share, self.choices)
        return self._seconds_among[num_devices]

    def agrees(self, program: Program) -> bool:
        """Whether ranks that compute in different dtypes never exchange values in these dtypes."""
        if not self.dtypes:
            return True
        key = (program.body, supports(program))
        if key not in self._agreeing:
            conflicts = dtype_conflicts(replace(program, dtypes=self.dtypes))
            self._agreeing[key] = next(conflicts, None) is None
        return self._agreeing[key]

    def parting(self, program: Program) -> str:
        """The reason why a program conflicts with an optimizer that needs whole parameters in one place: the
        program cuts them, or spreads them over ranks, as pipelines do. Empty if it does neither."""
        if not self.whole_parameters:
            return ""
        held = [owned_type(program, i) or i.type for i in program.params if i.result in program.requires_grad]
        if any(isinstance(t.placement, Shard) and len(program.participants(t)) > 1 for t in held):
            return "cuts parameters"
        return "spreads parameters over ranks" if len({program.participants(t) for t in held}) > 1 else ""

    def least_seconds(self, ranks: tuple[int, ...]) -> float:
        """A rough lower bound of a step in which all of these devices take part in everything: the work at
        their summed speed, and the fixed work of each (``bound_s`` holds for all plans, and is lower)."""
        seconds = self.seconds_among(len(ranks))
        return 1 / sum(1 / (seconds[r] * len(ranks)) for r in ranks)

    def simulation(self, program: Program, *, accumulating: bool = False) -> Simulation:
        """The simulation of a program, one for each set of ranks, for any ratio and micro-batches. The newest
        ones are kept."""
        ranks = supports(program)
        # exchanges of pieces take another time if all pieces are of one size
        evenly = bool(program.ratios) and program.body.moves_pieces and is_even(program.shares)
        way = accumulating, program.direct_bytes, evenly
        key = (program.body, ranks, way)
        if key not in self._simulations:
            # everything that does not depend on the ranks is known from the first such program
            alike = (program.body, tuple(len(r) == 1 for r in ranks), way)
            first = self._first.get(alike)
            length = program.direct_bytes, len(program.body.computations), evenly
            twins = [] if accumulating else self._same_but_owners.setdefault(length, [])
            twin = next((t for t in twins if t.differs_in_owners(program)), None)
            with self.timed("simulate"):
                if twin is not None:
                    simulation = twin.with_owners(program)
                elif first is not None:
                    simulation = first.on(program)
                else:
                    simulation = Simulation(
                        program, self.costs, self.optimizer_states, accumulating=accumulating
                    )
            self._simulations[key] = simulation
            if twin is None:
                twins.append(simulation)
            self._first.setdefault(alike, simulation)
        return self._simulations[key]

    def step_s(self, program: Program) -> float:
        """Seconds of a step in the program's own buckets, without micro-batches."""
        return self.simulation(program).step_s(program)

    def judge(
        self,
        planner: str,
        program: Program,
        simulation: Simulation | None = None,
        step: str = "simulate",
        micro_batches: MicroBatches = None,
    ) -> Proposal:
        program = self.in_our_sums(planner, program)
        simulation = simulation or self.simulation(program)
        with self.timed(step):
            timeline = simulation.run(program, micro_batches, usable_bytes=self.usable_bytes)
        fits = self.has_room(timeline) and self.agrees(program) and not self.parting(program)
        fits = fits and not (self.has_local_norms and any(lonely_norms(program)))
        proposal = Proposal(planner, program, timeline, fits, simulation, micro_batches=micro_batches)
        if fits:
            self.best_s = min(self.best_s, timeline.step_s)
            if self.kinds is not None:
                before = self.kinds.setdefault(proposal.kind, proposal)
                self.kinds[proposal.kind] = min(before, proposal, key=lambda p: p.key)
        return proposal

    def _by_buckets(
        self, program: Program, simulation: Simulation, micro_batches: MicroBatches, *, every: bool
    ) -> list[Buckets]:
        """Buckets of several sizes, the fastest first: of ``every`` size, or of the usual size and then
        smaller or larger ones as long as they get faster."""
        tried: dict[Buckets, float] = {}

        def step_s(size_bytes: float) -> float:
            (buckets,) = bucketings(program, (size_bytes,), simulation.step.summed)
            if buckets not in tried:
                tried[buckets] = simulation.step_s(program, micro_batches, buckets)
            return tried[buckets]

        with self.timed("simulate"):
            least = step_s(USUAL_BYTES)
            for sizes in (SMALLER_BYTES, LARGER_BYTES):
                for size in sizes:
                    time_s = step_s(size)
                    if time_s >= least and not every:
                        break
                    least = min(time_s, least)
        return sorted(tried, key=tried.__getitem__)

    def usual_s(
        self, planner: str, program: Program, size_bytes: float = USUAL_BYTES, *, levelled: bool = True
    ) -> float:
        """Seconds of a step in buckets of the usual size, or of another; with hierarchical sums if these
        pay."""
        program = self.in_our_sums(planner, program)
        program = program if levelled or program.levels is None else program.changed(levels=None)
        simulation = self.simulation(program)
        with self.timed("simulate"):
            (buckets,) = bucketings(program, (size_bytes,), simulation.step.summed)
            return simulation.step_s(program, buckets=buckets)

    def best_buckets(
        self,
        planner: str,
        program: Program,
        simulation: Simulation | None = None,
        micro_batches: MicroBatches = None,
    ) -> Proposal:
        program = self.in_our_sums(planner, program)
        simulation = simulation or self.simulation(program)
        # thorough for a small program, so that the bar for the others is as high as it can be
        every = planner in BASELINES or EACH.pays_for(CARE_STEPS, len(program.instructions))
        variants = self._by_buckets(program, simulation, micro_batches, every=every)
        # the fastest that fits; the memory of slower ones need not be known
        judged = []
        for buckets in variants:
            variant = numbered(program, buckets)
            judged.append(self.judge(planner, variant, simulation, micro_batches=micro_batches))
            if judged[-1].feasible:
                break
        return min(judged, key=lambda p: p.key)

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
            return program.shares
        try:
            with self.timed("ratios"):
                ratio = optimal_ratio(
                    program,
                    self.costs,
                    ranks,
                    optimizer_states=self.optimizer_states,
                    headroom=headroom,
                    step=simulation.step,
                    memory=simulation.memory,
                    limited=limited,
                )
        except Infeasible:
            return None
        if support(ratio) != ranks:
            # the LP has left a device out: that is another set of devices, which is tried separately
            ratio = make_ratio([max(s, 1 / self.batch) if r in ranks else 0 for r, s in enumerate(ratio)])
        return ratio
