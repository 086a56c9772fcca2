"""Two levels: samples divided between machines, and within each machine a program of its own.

Links between machines are slow, so only gradients pass there. Within a machine a search finds the best
program for its devices and links, tensor parallelism for instance, with any number of devices. If a parameter
is cut within machines, each device sums only its own piece with those of other machines.

If the best of these does not fit in memory, the machines that lack it divide shares by memory, recompute
activations or store parameters in shards, whichever is fastest; a machine that becomes slower is given fewer
samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from ..cluster.device import HEADROOM
from ..cost.exchanges import Exchange
from ..lang.ir import Program, make_ratio, regions, support
from ..passes.buckets import with_buckets
from ..passes.recomputation import recomputed
from ..search.baselines import TENSOR_PARALLEL, fully_sharded, only
from ..search.placement.join import Set, join
from ..search.placement.part import NotDivisible, Part, part_of
from ..search.placement.split import split
from ..search.ratios import usable_bytes
from ..simulator import Timeline
from .budget import EACH
from .device_sets import busiest_link_s
from .hap import LOST, SPARE, Synthesis
from .passes import REMATERIALISATION
from .passes.rematerialisation import fewest
from .passes.shares import whole_counts
from .proposal import Proposal
from .task import Task
from .tried import Tried

# prices of a second of gradient sums within a machine: sums between machines take longer, the more so the
# slower the link
PRICES = (8.0, TENSOR_PARALLEL.gradient_sync, 1.0)
ROUNDS = 2  # rounds of dividing samples
WORTH = 1.1  # factor on the seconds of computing alone: a faster best step has little to gain
# the same factor if the budget does not pay for this many steps of the graph on each kind of machine: about
# two seconds
MUCH_WORTH, KIND_STEPS = 1.3, 3
HOPELESS = 1.2  # a program slower than the best by this factor gets no other shares, prices or buckets
MOST_MACHINES = 8
BUCKET_BYTES = 16e6  # bucket size of programs under comparison


Fitting = tuple[Program, bool]  # a machine's program, and whether some shares of it fit in memory


@dataclass(frozen=True)
class Found:
    """The program that a set of ranks has for its part of the batch, that set's predicted step, and whether
    some shares of it fit in memory, if that counts."""

    set: Set
    step_s: float
    may_fit: bool = True


def two_level(task: Task) -> Iterator[Proposal]:
    """Proposes two-level programs; none for a single machine, or for one device in each."""
    return TwoLevel(task).proposals()


def machines_of(task: Task) -> list[tuple[int, ...]]:
    """The ranks of each machine."""
    cluster = task.costs.cluster
    mine = set(task.ranks)
    machines = (cluster.ranks_of(m) for m in range(len(cluster.machines)))
    return [chosen for ranks in machines if (chosen := tuple(r for r in ranks if r in mine))]


def has_levels(machines: list[tuple[int, ...]]) -> bool:
    return len(machines) > 1 and max(map(len, machines)) > 1


def promising(task: Task) -> Iterator[Proposal]:
    """Like ``two_level``, but proposes nothing if two levels are not worth the time outside of a search."""
    if least_two_level_s(task) is not None:
        yield from two_level(task)


def least_two_level_s(task: Task) -> float | None:
    """A rough lower bound of a step of two levels; None if they are not worth the time outside of a search,
    because the best plan so far is near that bound (less near, for larger models)."""
    machines = machines_of(task)
    if not has_levels(machines) or len(machines) > MOST_MACHINES:
        return None
    kinds = {tuple(task.costs.class_of[r] for r in ranks) for ranks in machines}
    worth = WORTH if EACH.pays_for(KIND_STEPS, len(task.graph.nodes) * len(kinds)) else MUCH_WORTH
    least_s = max(task.least_seconds(task.ranks), between_machines_s(task, machines))
    return least_s if task.best_s > worth * least_s else None


def between_machines_s(task: Task, machines: Sequence[tuple[int, ...]]) -> float:
    """Seconds for which all gradients occupy the busiest link between machines. They cross it whole,
    regardless of how they are cut within machines."""
    one_of_each = tuple(ranks[0] for ranks in machines)
    return busiest_link_s(task, Exchange("all_reduce", task.gradient_bytes, one_of_each))


class TwoLevel:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.machines = machines_of(task)
        self._parts: dict[tuple[tuple[int, ...], int], tuple[Part, str]] = {}
        self._found: dict[tuple, Program | None] = {}
        self._fitting: dict[tuple, Fitting] = {}
        # share of memory that machines leave free; None if memory does not count
        self.spare: float | None = None
        self.may_fit = False  # whether all machines have had shares that fit, with that much left free
        self._tasks: dict[tuple, Task] = {}

    def proposals(self) -> Iterator[Proposal]:
        """Yields programs from the fastest until one fits in memory. If none does, yields the fastest that
        fits when planned with less memory."""
        candidate = None
        for step_s, program in sorted(self.candidates(), key=lambda found: found[0]):
            if candidate is not None and step_s > HOPELESS * self.task.best_s:
                break  # its memory takes long to find
            candidate = self.task.best_buckets("two-level", program)
            yield candidate
            if candidate.feasible:
                return
        if candidate is None or fits(self.task, candidate.timeline, range(self.task.world_size)):
            return
        # joining machines takes more memory than their own programs
        for self.spare in SPARE:
            self.may_fit = False
            for step_s, program in sorted(self.candidates(), key=lambda found: found[0]):
                if step_s > LOST * self.task.best_s:
                    return
                candidate = self.task.best_buckets("two-level", program)
                if candidate.feasible:
                    yield self.with_fewest_regions(candidate)
                    return
            if not self.may_fit:
                return  # nor with more memory left free

    def with_fewest_regions(self, made: Proposal) -> Proposal:
        """Drops rematerialised regions as memory allows: first equally in all machines, then in the one that
        the others wait for."""
        made = REMATERIALISATION(self.task, made, self.task.budget)
        left = set(range(len(self.machines)))
        while left:
            slowest = max(range(self.task.world_size), key=lambda r: made.timeline.compute_s[r])
            m = next(m for m, ranks in enumerate(self.machines) if slowest in ranks)
            mine = regions_on(made.program, self.machines[m])
            fewer = fewest(self.task, made, mine)
            if m not in left or fewer.timeline.step_s >= made.timeline.step_s:
                break
            made = fewer
            left.discard(m)
        return made

    def candidates(self) -> Iterator[tuple[float, Program]]:
        """Programs with their seconds."""
        if not has_levels(self.machines) or self.task.batch < len(self.machines):
            return
        shares = self.task.proportional
        speeds = [sum(shares[r] for r in ranks) for ranks in self.machines]
        try:
            prices = self.prices()
            for price in prices:
                self.task.progress(f"planning: two levels, gradient price {price:g}")
                step_s = float("inf")
                for program in self.dealt(price, speeds):
                    candidate = self.task.in_our_sums("two-level", with_buckets(program, BUCKET_BYTES))
                    step_s = self.task.simulation(candidate).step_s(candidate)
                    yield step_s, program
                    if step_s > HOPELESS * self.task.best_s:
                        break
                if price == prices[0] and step_s > HOPELESS * self.task.best_s:
                    break
        except NotDivisible as error:
            self.task.refused = str(error)

    def prices(self) -> list[float]:
        """The prices, starting with the one nearest to the ratio of two times: reducing all gradients between
        machines, and within the slowest machine."""
        exchanges = [Exchange("all_reduce", self.task.gradient_bytes, ranks) for ranks in self.machines]
        within_s = max(busiest_link_s(self.task, e) for e in exchanges if len(e.ranks) > 1)
        between_s = between_machines_s(self.task, self.machines)
        # if nothing is trained there are no sums
        times = between_s / within_s if between_s and within_s else 1.0
        return sorted(PRICES, key=lambda price: abs(log(price / times)))

    def dealt(self, price: float, speeds: list[float]) -> Iterator[Program]:
        """Yields programs in which samples are dealt in proportion to the machines' measured speeds. Ends at
        a machine that alone takes too long."""
        seen: set[tuple[int, ...]] = set()
        for _ in range(ROUNDS):
            counts = whole_counts(make_ratio(speeds), self.task.batch)
            if counts in seen or 0 in counts:
                return
            seen.add(counts)
            programs: list[Found] = []
            for m in range(len(self.machines)):
                part = self.found(price, counts, m)
                if part is None or part.step_s > HOPELESS * self.task.best_s:
                    return
                programs.append(part)
            whole = {n.result: n.types[0] for n in self.task.graph.batch_inputs}
            self.may_fit = self.may_fit or all(f.may_fit for f in programs)
            yield join(self.task.graph.name, [f.set for f in programs], whole)
            speeds = [count / f.step_s for count, f in zip(counts, programs)]

    def found(self, price: float, counts: tuple[int, ...], m: int) -> Found | None:
        """The program of a machine for its samples, found once for all that have the same devices."""
        ranks, costs = self.machines[m], self.task.costs
        if (counts, m) not in self._parts:  # the same for all prices
            made = part_of(self.task.data_parallel(self.task.proportional), counts, m)
            self._parts[counts, m] = made, made.graph.fingerprint
        part, fingerprint = self._parts[counts, m]
        key = (tuple(costs.class_of[r] for r in ranks), fingerprint)
        inner = self.inner(key, part)
        if (price, key) not in self._found:
            self._found[price, key] = self.best(inner, ranks, price)
        program = self._found[price, key]
        if program is None:
            return None
        may_fit = True
        if self.spare is not None:
            if (price, key, self.spare) not in self._fitting:
                self._fitting[price, key, self.spare] = self.fitting(inner, program, ranks, self.spare)
            program, may_fit = self._fitting[price, key, self.spare]
        found_on = support(program.shares)
        shares = dict(zip(ranks, (program.shares[r] for r in found_on)))
        mine = program.with_shares(make_ratio([shares.get(r, 0.0) for r in range(self.task.world_size)]))
        return Found(Set(part, mine), inner.simulation(mine).step_s(mine), may_fit)

    def inner(self, key: tuple, part: Part) -> Task:
        if key not in self._tasks:
            task = self.task
            self._tasks[key] = Task(
                part.graph,
                task.costs,
                task.optimizer_states,
                task.progress,
                whole_parameters=task.whole_parameters,
            )
        return self._tasks[key]

    def best(self, inner: Task, ranks: tuple[int, ...], price: float) -> Program | None:
        """The cheapest program of a part on these ranks, and the best shares for it."""
        if len(ranks) == 1:
            return inner.data_parallel(only(ranks[0], inner.world_size))
        program, _, _ = Synthesis(inner).find(inner.shares(ranks), price, Tried())
        if program is None:
            return None
        ratio = inner.ratio(inner.simulation(program), program, ranks, limited=False)
        return program if ratio is None else program.with_shares(ratio)

    def fitting(self, inner: Task, program: Program, ranks: tuple[int, ...], spare: float) -> Fitting:
        """The fastest form of a machine's program that fits; if none does, the one that needs the least
        memory."""
        if fits(inner, inner.simulation(program).run(program), ranks, spare):
            return program, True
        again, candidates, may_fit = inner.made_once(recomputed, program), [], False
        forms = (program, again, *([inner.made_once(fully_sharded, again)] if len(ranks) > 1 else []))
        for form in forms:
            simulation = inner.simulation(form)
            ratio = inner.ratio(simulation, form, ranks, HEADROOM + spare)
            if ratio is None:
                continue
            may_fit, shared = True, form.with_shares(ratio)
            timeline = simulation.run(shared)
            if fits(inner, timeline, ranks, spare):
                candidates.append((timeline.step_s, shared))
        fastest = min(candidates, key=lambda pair: pair[0], default=None)
        return (forms[-1] if fastest is None else fastest[1]), may_fit


def regions_on(program: Program, ranks: tuple[int, ...]) -> list[int]:
    """The numbers of the regions that run on some of ``ranks`` and on no others."""
    starts = {number: program.instructions[members[0]] for number, members in regions(program).items()}
    return [number for number, i in starts.items() if {*program.participants(i.types[0])} <= {*ranks}]


def fits(task: Task, timeline: Timeline, ranks: Iterable[int], spare: float = 0.0) -> bool:
    """Whether ranks have the memory for a step, with a part ``spare`` left free."""
    peaks = timeline.peak_memory_bytes
    return all(peaks[r] <= usable_bytes(task.costs, r, HEADROOM + spare) for r in ranks)


def recomputed_within(program: Program) -> Program:
    """A two-level program in which every machine rematerialises everything that it can."""
    sets, values = split(program)
    return join(program.name, [replace(s, program=recomputed(s.program)) for s in sets], values)
