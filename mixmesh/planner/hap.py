"""HAP: alternates between searching a program and solving an LP for its shares, for several prices and sets
of devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..base.lazy import lazy
from ..cluster.device import HEADROOM
from ..cost.placed import supports
from ..lang.ir import PARTIAL, Program, Ratio, Shard, regions, support
from ..passes.factors import most_saved_s
from ..passes.recomputation import recomputed
from ..search.baselines import fully_sharded
from ..search.synthesis import Found, NoProgram, Prices, Problem, search
from ..search.synthesis.choices import code_of
from ..simulator import Simulation
from .budget import CARE_STEPS, EACH
from .device_sets import ABOUT, device_sets, least_parallel_s, sets_in_need
from .passes import FACTORS, REMATERIALISATION, SHARES, Pass
from .proposal import Proposal
from .task import HIDDEN, HOPEFUL, SMALLER_BYTES, USUAL_BYTES, Task
from .tried import Tried

SUM_EXP = "mixmesh.sum_exp"
DDP_TUNED = "ddp-tuned"
# price of a second of gradient communication: all counts, none counts, much is hidden
FULL_PRICE = 1.0
GRADIENT_PRICES = (0.0, FULL_PRICE, 0.3)
DATA_PARALLEL_ONLY = (None,)
# the least number of sets of devices to search; the share of the budget for a step of each set
LEAST_SETS, SETS_SHARE = 2, 0.2834
# factor for substitutes: a set whose memory is too small is replaced by another one
MORE_SETS = 3
FEW_SETS = 4  # if there are this many sets, some may be chosen for other reasons than their data parallelism
WEIGHT = 1.01  # factor by which the program that a search returns may cost more than the cheapest
# in all searches together, before a search keeps only the best few states of every step
MAX_STATES, MAX_STATES_PER_STEP = 50, 1.5
MAX_ROUNDS = 4
SAME_RATIO = 0.025  # shares that differ by less lead to the same program
LOST = 1.01  # a program whose step stays above the best one times this is dropped
# with a large model, devices are left as soon as no program there can gain more than what is missing to 1
ALMOST = 0.995
HIDDEN_AT_BEST = 0.5  # the share of a sum of computing and communication that overlap may hide at best
FAR = 1.05  # a program slower by this factor gets no other bucket sizes, shares or prices
HOPELESS = 1.2  # if programs at both ends of the prices are slower by this factor, no price between is tried
CLOSE = 1.1  # relative cost up to which whole classes are tried too: they may still be faster than cut ones
CLASSES_STEPS = 5  # steps that a budget must pay for to try whole classes too: up to 1200 nodes
SPARE = (0.0, 0.03, 0.1)  # shares of a device's memory that are left free for rounding
FULL = 0.9  # share of usable memory: a rank that holds less could take more samples
# share of the batch: if a rank's part would change by more without memory limits, memory limits the shares
BOUND_BY_MEMORY = 0.05


def synthesised(task: Task) -> Iterator[Proposal]:
    """Proposes programs found by search at several prices of gradients, and data parallelism unless it was
    proposed before."""
    return Synthesis(task).proposals((None, *GRADIENT_PRICES))


def tuned(task: Task) -> Iterator[Proposal]:
    """Proposes data parallelism with the best shares, on several sets of devices: the search has to beat
    it."""
    return Synthesis(task, DDP_TUNED).proposals(DATA_PARALLEL_ONLY)


def most_states(problem: Problem) -> int:
    """The number of states that the search may expand before it keeps only the best few of every step."""
    return MAX_STATES + round(MAX_STATES_PER_STEP * len(problem.steps))


class Synthesis:
    """Alternates between programs and shares for one task, on behalf of ``planner``. Programs that were
    already tried for data parallelism are not tried again."""

    def __init__(self, task: Task, planner: str = "hap") -> None:
        self.task, self.planner = task, planner
        if DDP_TUNED not in task.proposed:
            task.tried = {}
        self.paths: dict[float, Found] = {}  # for each price, the last path found on any devices

    def proposals(self, prices: Sequence[float | None]) -> Iterator[Proposal]:
        """Alternates between program and ratio, for several prices and sets of devices. The sets with the
        lowest bound for data parallelism come first, and sets that cannot beat the best plan are left out.
        The bound ignores memory: if a set's memory is too small for its programs, its place goes to another
        set that was left out for lack of time, preferably that of all devices."""
        task, baseline = self.task, self.task.proposed.get(DDP_TUNED)
        best = None if baseline is None else (baseline.key, support(baseline.program.shares))
        sets = self.sets()
        chosen = self.in_time(sets, prices)
        others = [ranks for ranks in sets if ranks not in chosen]
        substitutes = sorted(others, key=lambda ranks: ranks != task.ranks)[: MORE_SETS * len(chosen)]
        while chosen:
            ranks = chosen.pop(0)
            if best is not None and self.is_slower(ranks, prices):
                continue
            on_these: list[Proposal] = []
            for proposal in self.on(ranks, prices, judged=best is None):
                if best is None or proposal.key < best[0]:
                    best = proposal.key, ranks
                on_these.append(proposal)
                yield proposal
            if substitutes and is_short_of_memory(on_these):
                chosen.insert(0, substitutes.pop(0))
        for ranks in sets_in_need(task):
            if task.best_s == float("inf"):
                yield from self.on(ranks, prices, judged=best is None)
        if best is not None:
            yield from self.with_whole_classes(best[1])

    def sets(self) -> list[tuple[int, ...]]:
        """Sets of devices, the lowest bound for data parallelism first."""
        tried = self.task.tried

        def hope(ranks: tuple[int, ...]) -> tuple[float, int]:
            least_s = tried[ranks].least_s if ranks in tried else ()
            return min(least_s, default=least_parallel_s(self.task, ranks)), -len(ranks)

        return sorted(device_sets(self.task), key=hope)

    def in_time(
        self, sets: Sequence[tuple[int, ...]], prices: Sequence[float | None]
    ) -> list[tuple[int, ...]]:
        """The first sets that may be faster than the best plan, as many as the time allows. If that is more
        than a few, they include all devices and the fastest machine alone, which a search may use even if
        data parallelism cannot."""
        task, most = self.task, self.most_sets(prices)
        if most >= len(sets):
            return [*sets]
        worth = [ranks for ranks in sets if not self.is_slower(ranks, prices)]
        if most < FEW_SETS:
            return worth[:most]
        machine_of = task.costs.cluster.machine_index_of
        machines = [ranks for ranks in worth if len(ranks) > 1 and len({*map(machine_of, ranks)}) == 1]
        wanted = [task.ranks, *sorted(machines, key=task.least_seconds)[:1]]
        others = [ranks for ranks in worth if ranks not in wanted]
        chosen = {*others[: most - len(wanted)], *wanted}
        return [ranks for ranks in worth if ranks in chosen]

    def is_slower(self, ranks: tuple[int, ...], prices: Sequence[float | None]) -> bool:
        """Whether no program on these devices is likely to be faster than the best."""
        return ABOUT * self.least_s(ranks, prices) >= self.task.best_s

    def least_s(self, ranks: tuple[int, ...], prices: Sequence[float | None]) -> float:
        """A rough lower bound for programs on these devices. For data parallelism of a small program, the
        seconds saved by factors are unknown until it is made."""
        parallel = prices == DATA_PARALLEL_ONLY and self.is_large
        return least_parallel_s(self.task, ranks) if parallel else self.task.least_seconds(ranks)

    @lazy
    def is_large(self) -> bool:
        """Whether the model is too large for a thorough examination of every program."""
        return not EACH.pays_for(CARE_STEPS, len(self.task.graph.nodes))

    @property
    def is_brief(self) -> bool:
        """Whether searches are left out that can gain little."""
        return self.is_large and not self.task.budget.is_ample

    def most_sets(self, prices: Sequence[float | None]) -> int:
        """The number of sets for which the budget pays for a search."""
        if self.task.budget.is_ample or prices == DATA_PARALLEL_ONLY:
            return sys.maxsize
        return max(LEAST_SETS, int(self.task.budget.part(SETS_SHARE).steps(len(self.task.graph.nodes))))

    def on(self, ranks: tuple[int, ...], prices: Sequence[float | None], judged: bool) -> Iterator[Proposal]:
        """Proposals for a set of devices. The first one is ``judged`` however slow it is."""
        task, tried = self.task, self.task.tried.setdefault(ranks, Tried())
        enough = ALMOST if self.is_brief else LOST
        for price in prices:
            if len(ranks) == 1 and price is not None:
                continue  # nothing to communicate
            if price is not None and tried.same_at_both_ends:
                continue  # the cheapest program at both ends is also the cheapest in between
            if not judged and 0.0 in tried.by_price and min(tried.floors_s) > enough * task.best_s:
                return  # even with free gradients these devices are too slow, so no other price will help
            if tried.is_beaten:
                return
            if len(tried.by_price) == 2 and min(tried.least_s, default=0.0) > HOPELESS * task.best_s:
                continue
            what = "data parallel" if price is None else f"gradient price {price:g}"
            task.progress(f"planning: {self.planner}, {len(ranks)} devices, {what}")
            for proposal in self.alternate(ranks, price, tried, judged):
                judged = False
                yield proposal

    def with_whole_classes(self, ranks: tuple[int, ...]) -> Iterator[Proposal]:
        """Programs with whole classes in place of one that cuts the classes of a loss: a gather of the head's
        weight may be hidden, which prices do not show, while one of hidden states is not."""
        tried = self.task.tried.get(ranks, Tried())
        small = EACH.pays_for(CLASSES_STEPS, len(self.task.graph.nodes))
        for price, cost_s in [*tried.cutting_classes.items()][-1:] if small else ():
            self.task.progress(f"planning: {self.planner}, {len(ranks)} devices, whole classes")
            yield from self.alternate(ranks, price, tried, judged=False, whole_s=CLOSE * cost_s)

    @lazy
    def sums_of_samples(self) -> dict[int, int]:
        """The sums over classes, as codes of the search: sums over whole rows, cut between samples."""
        choices = self.task.choices
        return {choices.ids[n.result]: code_of(Shard(0)) for n in choices.steps if n.op == SUM_EXP}

    def known(self, price: float) -> list[Found]:
        """Paths that may be the cheapest at a price: the one from other devices or shares, and data
        parallelism if sums are free."""
        spread = self.task.data_parallel_path(alone=False) if price == 0.0 else None
        return [path for path in (spread, self.paths.get(price)) if path is not None]

    def find(
        self,
        ratio: Ratio,
        price: float | None,
        tried: Tried,
        *,
        judged: bool = True,
        whole_s: float | None = None,
    ) -> tuple[Program | None, int, float | None]:
        """The cheapest program under a ratio, with its identifying number and its gap; no program if it was
        ``tried``, or cannot become the fastest and need not be ``judged``. Without a price for gradients it
        is data parallelism. With ``whole_s`` the classes of a loss are whole, and a program that costs more
        seconds than that does not count."""
        if price is None:
            return self.data_parallel(ratio, tried.seen)
        seen = tried.seen
        with self.task.timed("search"):
            problem = Problem(
                self.task.graph,
                self.task.costs,
                ratio,
                prices=Prices(gradient_sync=price),
                optimizer_states=self.task.optimizer_states,
                choices=self.task.choices,
                forced=self.sums_of_samples if whole_s is not None else None,
            )
            try:
                earlier = self.known(price) if whole_s is None else ()
                path = search(problem, weight=WEIGHT, max_states=most_states(problem), known=earlier)
            except NoProgram:
                return None, 0, None
            if whole_s is None:
                self.paths[price] = path
            self.task.states_expanded += path.states_expanded
            number = path.number
            if price == FULL_PRICE and whole_s is None and not judged and self.is_beaten(path):
                tried.is_beaten = True
                return None, number, path.gap
            if number in seen or (whole_s is not None and path.cost_s > whole_s):
                return None, number, path.gap
            program = self.task.spell(problem, path)
            shape = shape_of(program)
            self.task.searched.setdefault(shape, (problem, path))
            was_seen = shape in seen
            seen.update((number, shape))
            return None if was_seen else program, number, path.gap

    def data_parallel(self, ratio: Ratio, seen: set[int]) -> tuple[Program | None, int, None]:
        """The result of ``find`` without a price for gradients."""
        program = self.task.data_parallel(ratio)
        path = self.task.data_parallel_path(alone=len(support(ratio)) == 1)
        assert path is not None  # it has been asked for just now
        if path.number in seen:
            return None, path.number, None
        seen.add(shape_of(program))
        return program, path.number, None

    def is_beaten(self, cheapest: Found) -> bool:
        """Whether no program can become the fastest on the devices for which this one has the least sum of
        computing, exchanges and gradient sums, even if one of them hides the rest. Never if the budget pays
        for everything."""
        return self.is_brief and HIDDEN_AT_BEST * cheapest.cost_s > LOST * self.task.best_s

    def alternate(
        self,
        ranks: tuple[int, ...],
        price: float | None,
        tried: Tried,
        judged: bool,
        whole_s: float | None = None,
    ) -> Iterator[Proposal]:
        """Q = argmin t(., B), B = argmin t(Q, .), until nothing is gained; the best pair, polished.

        ``tried`` are earlier trials on these ranks. A program that cannot become the fastest is left out,
        unless it is to be ``judged`` in any case.
        """
        ratio = self.task.shares(ranks)
        best: Proposal | None = None
        for turn in range(MAX_ROUNDS):
            program, number, gap = self.find(ratio, price, tried, judged=judged, whole_s=whole_s)
            if turn == 0 and price is not None and whole_s is None:
                tried.by_price[price] = number
            if program is None:
                break  # another price or ratio has led to the same program
            tried.seen.add(number)
            if cuts_classes(program):
                tried.cutting_classes.setdefault(price, self.task.searched[shape_of(program)][1].cost_s)
            program = self.task.packed(program)
            simulation = self.task.simulation(program)
            free, floor_s, least_s = self.bounds(program, ranks)
            if turn == 0 and tried.holds(floor_s, least_s):
                break  # practically the same program
            tried.floors_s.append(floor_s)
            tried.least_s.append(least_s)
            if not judged and self.is_lost(free, simulation, least_s):
                break
            better = self.task.ratio(simulation, program, ranks)
            candidate = self.task.best_buckets(self.planner, program.with_shares(better or ratio), simulation)
            candidate = replace(candidate, gap=gap)
            tried.roomy &= candidate.feasible and not candidate.timeline.peak_memory_bytes
            yield from self.in_less_memory(candidate, program, ranks, least_s)
            if best is not None and best.key <= candidate.key:
                break
            best = candidate
            if better is None or is_same(ratio, better):
                break
            ratio = better
        if best is not None:
            improved = self.improved(best, FACTORS, SHARES)
            if improved.program.body != best.program.body:
                yield best  # reduced to owners, it may be faster than with factors
            yield improved

    def in_less_memory(
        self, made: Proposal, program: Program, ranks: tuple[int, ...], least_s: float
    ) -> Iterator[Proposal]:
        """Forms of the program that hold less. Empty unless ``made``, the program under its best shares, does
        not fit, or its shares are limited by memory."""
        if not made.feasible:
            yield from self.stored_sharded(program, ranks)
        if not made.feasible or self.bound_by_memory(made, ranks):
            yield from self.computed_again(program, ranks, least_s)

    def is_lost(self, program: Program, simulation: Simulation, least_s: float) -> bool:
        """Whether a program whose step takes at least ``least_s`` with any buckets is not worth examining.
        Examining a small program may pay: order may hide exchanges within its passes, owners may hide
        reductions of its gradients, and gradients from factors may save some of these."""
        best_s = self.task.best_s
        if EACH.pays_for(CARE_STEPS, len(program.instructions)):
            saved_s = most_saved_s(program, self.task.costs)
            lost_s = HOPEFUL * (best_s + simulation.exchanged_s + saved_s)
            far_s = max(lost_s, best_s + simulation.exchanged_s + saved_s + HIDDEN * least_s)
            # one bucket may have all of its gradients, and levels pay only if buckets follow each other
            sums = [*product((USUAL_BYTES, SMALLER_BYTES[-1]), (True, False))]
        else:
            lost_s, far_s, sums = LOST * best_s, FAR * best_s, [(USUAL_BYTES, True)]
        usual_s = self.task.usual_s
        return least_s > lost_s or all(
            usual_s(self.planner, program, size, levelled=levelled) > far_s for size, levelled in sums
        )

    def bounds(self, program: Program, ranks: tuple[int, ...]) -> tuple[Program, float, float]:
        """The program under the best shares without a limit on memory, and two lower bounds of its step under
        these shares: without any sums, and with any buckets."""
        program = self.task.in_our_sums(self.planner, program)
        simulation = self.task.simulation(program)
        ratio = self.task.ratio(simulation, program, ranks, limited=False) or program.shares
        free = program.with_shares(ratio)
        with self.task.timed("simulate"):
            return free, *simulation.least_s(free)

    def improved(self, proposal: Proposal, *rows: Pass) -> Proposal:
        """The proposal after the passes for a program that a search has just found."""
        for row in rows:
            proposal = row(self.task, proposal, self.task.budget)
        return proposal

    def bound_by_memory(self, made: Proposal, ranks: tuple[int, ...]) -> bool:
        """Whether the shares would be different if all ranks had enough memory."""
        if not made.timeline.peak_memory_bytes:
            return False  # it certainly fits
        if all(made.peak_memory_bytes[r] < FULL * self.task.usable_bytes[r] for r in ranks):
            return False
        free = self.task.ratio(made.simulation, made.program, ranks, limited=False)
        pairs = zip(made.program.shares, free or ())
        return max((abs(a - b) for a, b in pairs), default=0.0) > BOUND_BY_MEMORY

    def computed_again(self, program: Program, ranks: tuple[int, ...], least_s: float) -> Iterator[Proposal]:
        """The same program with as few rematerialised activations as make it fit in memory, and also with
        parameters stored in shards if that is not enough. Left out if ``least_s``, a bound without
        rematerialisation, is slower than the best plan."""
        candidate = self.task.made_once(recomputed, program)
        if not regions(candidate) or least_s > LOST * self.task.best_s:
            return
        for stored in (candidate, *([self.sharded(candidate)] if len(ranks) > 1 else [])):
            best = self.fitting(stored, ranks)
            if best is not None:
                yield best
                if best.feasible:
                    yield self.improved(best, REMATERIALISATION, SHARES)
                    return

    def sharded(self, program: Program) -> Program:
        return self.task.made_once(fully_sharded, program)

    def fitting(self, program: Program, ranks: tuple[int, ...]) -> Proposal | None:
        """The program under the LP's shares, with a little more memory left free if rounding requires it;
        None if no shares fit."""
        simulation, best = self.task.simulation(program), None
        for spare in SPARE:
            ratio = self.task.ratio(simulation, program, ranks, HEADROOM + spare)
            if ratio is None:
                break
            best = self.task.best_buckets(self.planner, program.with_shares(ratio), simulation)
            if best.feasible:
                break
        return best

    def stored_sharded(self, program: Program, ranks: tuple[int, ...]) -> Iterator[Proposal]:
        """The same program with parameters stored in shards, for devices that cannot hold all of them.

        Shards are whole rows and samples, so the LP's shares are rounded. If rounding exceeds a device's
        memory, the LP is solved again with a little more left free.
        """
        if len(ranks) == 1:
            return
        sharded = self.sharded(program)
        simulation = self.task.simulation(sharded)
        for spare in SPARE:
            ratio = self.task.ratio(simulation, sharded, ranks, HEADROOM + spare)
            if ratio is None:
                return
            candidate = self.task.judge(self.planner, sharded.with_shares(ratio), simulation)
            if candidate.feasible or spare == SPARE[-1]:
                yield self.improved(candidate, SHARES)
                return


def is_short_of_memory(proposals: Sequence[Proposal]) -> bool:
    """Whether none of the proposals for a set of devices fits with all of its activations kept."""
    return bool(proposals) and not any(p.feasible and not regions(p.program) for p in proposals)


def is_same(ratio: Ratio, other: Ratio) -> bool:
    """Whether both ratios lead to the same program."""
    return max(abs(a - b) for a, b in zip(ratio, other)) < SAME_RATIO


def shape_of(program: Program) -> int:
    """A hash of a program's placements and ranks."""
    return hash((supports(program), *((i.op, i.types) for i in program.instructions)))


def cuts_classes(program: Program) -> bool:
    return any(i.op == SUM_EXP and i.type.placement == PARTIAL for i in program.instructions)
