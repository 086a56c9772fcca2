"""Pipelines: chains of stages in micro-batches, found by an estimate and judged by the simulator.

A stage is a device, the equal devices of a machine or a whole machine. For every order of the machines, every
set of the faster ones and every number of micro-batches, a dynamic programme over the groups of operators
finds the borders between stages for which the slowest stage or transfer is fastest, among those that fit. A
step of m micro-batches is then estimated as one micro-batch through all stages, plus m - 1 at the pace of the
slowest (``through_s``), plus what is left of the sums of gradients.
With ``BLOCKING_SENDS`` a stage takes the time to compute and to send.

``hopeful`` does as much as ``auto`` has time for, after a search of placements: if devices compute far from
all the time under the best plan, chains are estimated, and those faster than that plan are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, permutations

import numpy as np

from ..base.lazy import lazy
from ..cost.exchanges import Exchange, sent_between
from ..cost.unmeasured import BLOCKING_SENDS
from ..errors import PlanError
from ..lang.ir import Shard, make_ratio, samples_of, shard_sizes, with_whole_rows
from ..lang.plan_file import MicroBatch
from ..search.placement import Placed, Space
from .budget import EACH
from .proposal import Proposal
from .spaces import space_of
from .task import Task

GROUPS = 96  # number of groups of operators, between which borders may be
MOST_MICRO_STEPS = 96
ORDERS = 40  # limit on the orders of machines that are tried
MOST_STAGES = 16
JUDGED = 4  # number of plans of each kind of stages that are simulated
# numbers of plans of all kinds that are simulated, and steps of the graph that the budget must pay for: up to
# 300 nodes, or up to 545
MOST_HOPEFUL, MOST_STEPS = 8, 20
HOPEFUL, HOPEFUL_STEPS = 2, 11
MOST_KEPT = 512  # matrices of 97 x 97 seconds
LEAST_STEPS = 6  # steps without which no pipelines are looked for: up to 1000 nodes
MOST_DEVICES = 16
WORTH = 1.15  # factor on the bound of all plans: a faster step has little to gain
# factor on the best step: simulated steps are 0.97 to 1.2 times the estimate, mostly 1.06
LIKELY, MOST_LIKELY = 0.92, 1.05
APART = 1.3  # smallest factor between two tried numbers of micro-batches
BACKWARD = 2 / 3  # rough share of the backward pass in a micro-batch's seconds
LAST = 0.1  # rough share of a stage's gradients whose sum begins after all of its passes
FILLED = (1.0, 0.85, 0.7)  # shares of memory that the estimate may fill; less if the simulator refuses
OVERFILLED = (1.5, 2.0, 4.0, float("inf"))  # the same where nothing fits, to tell how much memory lacks

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """Stages with these ``shares`` (samples of a micro-batch per rank); each has the groups up to its entry
    in ``ends``."""

    micro_steps: int
    shares: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    step_s: float  # estimated

    def strategy(self) -> tuple[Placed, ...]:
        """One choice for each group."""
        starts = (0, *self.ends)
        return tuple(
            Placed(make_ratio(counts))
            for counts, start, end in zip(self.shares, starts, self.ends)
            for _ in range(start, end)
        )


def pipelines(task: Task, planner: str = "pipeline") -> Iterator[Proposal]:
    """The chains of every kind of stages with the best estimates, simulated; those that lack the least memory
    if nothing was proposed. None for a model that cannot run in micro-batches."""
    space = space_of(task, count=GROUPS)
    refused = found = False
    for part in (*FILLED, *OVERFILLED):
        if part in OVERFILLED and (found or task.proposed):
            return
        fits = False
        with task.timed("pipelines"):
            chains = list(proposed(task, space, part))
        for chain in chains:
            found = True
            try:
                chained = judged(task, space, chain, planner)
            except PlanError as error:
                refused, task.refused = True, str(error)
                continue
            fits = fits or chained.feasible
            yield chained
        if fits or refused:
            return


def hopeful(task: Task) -> Iterator[Proposal]:
    """The chains that are estimated as faster than the best plan so far by more than the error of the
    estimate, if there is enough to gain and not too much to plan."""
    if least_pipeline_s(task) is None:
        return
    try:
        samples_of(with_whole_rows(task.data_parallel(task.proportional)))
    except PlanError as error:
        task.refused = str(error)
        return  # no micro-batches
    space = space_of(task, count=GROUPS)
    with task.timed("pipelines"):
        small = EACH.pays_for(MOST_STEPS, len(task.graph.nodes))
        below_s = (MOST_LIKELY if small else LIKELY) * task.best_s
        chains = sorted(proposed(task, space, below_s=below_s), key=lambda chain: chain.step_s)
    few = HOPEFUL if EACH.pays_for(HOPEFUL_STEPS, len(task.graph.nodes)) else 1
    for chain in chains[:MOST_HOPEFUL] if small else spaced(chains)[:few]:
        try:
            yield judged(task, space, chain)
        except PlanError as error:
            task.refused = str(error)


def least_pipeline_s(task: Task) -> float | None:
    """A lower bound of every simulated step; None if pipelines have too little to gain for their time, or if
    there is too much to plan."""
    is_paid_for = EACH.pays_for(LEAST_STEPS, len(task.graph.nodes))
    small = is_paid_for and 1 < len(task.ranks) <= MOST_DEVICES
    return task.ideal_s if small and WORTH * task.ideal_s < task.best_s < float("inf") else None


def judged(task: Task, space: Space, chain: Chain, planner: str = "pipeline") -> Proposal:
    """Simulates a chain. Raises PlanError if its program cannot run in micro-batches."""
    with task.timed("lower"):
        program = with_whole_rows(space.lower(chain.strategy()))
    counts = samples_of(program).counts
    rows = (n // chain.micro_steps for n in counts)
    micro_batches = tuple(MicroBatch(n, chain.micro_steps, n) if n else MicroBatch(0, 0, 0) for n in rows)
    simulation = task.simulation(program, accumulating=True)
    return task.best_buckets(planner, program, simulation, micro_batches)


def proposed(task: Task, space: Space, part: float = 1.0, below_s: float = float("inf")) -> Iterator[Chain]:
    """Yields some chains of every kind of stages with the shortest estimates, if these are ``below_s``."""
    estimate = _Estimate(task, space, part)
    for kind in kinds_of_stages(space, task.ranks):
        bests = []
        every = list(arrangements(space, kind))
        for micro_steps in range(2, MOST_MICRO_STEPS + 1):
            if space.batch % micro_steps or space.batch // micro_steps < max(map(len, kind)):
                continue
            best = estimate.fastest(every, micro_steps, below_s)
            bests += [] if best is None else [best]
        yield from spaced(sorted(bests, key=lambda chain: chain.step_s))


def spaced(chains: Sequence[Chain]) -> list[Chain]:
    """The first chains whose numbers of micro-batches differ enough from each other: the error of the
    estimate grows with that number."""
    out: list[Chain] = []
    for chain in chains:
        near = (
            max(c.micro_steps, chain.micro_steps) < APART * min(c.micro_steps, chain.micro_steps) for c in out
        )
        if len(out) < JUDGED and not any(near):
            out.append(chain)
    return out


def kinds_of_stages(space: Space, ranks: Ranks) -> list[tuple[Ranks, ...]]:
    """The kinds of stages with more than one stage: machines, equal devices of a machine, single devices,
    each within ``ranks``."""
    by_machine: dict[int, list[int]] = {}
    for rank in ranks:
        by_machine.setdefault(space.costs.cluster.machine_index_of(rank), []).append(rank)
    machines = tuple(map(tuple, by_machine.values()))
    equal = tuple(group for group in space.device_groups if set(group) <= set(ranks))
    single = tuple((rank,) for rank in ranks)
    return [kind for kind in dict.fromkeys((machines, equal, single)) if len(kind) > 1]


def arrangements(space: Space, units: Sequence[Ranks]) -> Iterator[tuple[Ranks, ...]]:
    """Orders of all stages, and of the fastest of them, in which the stages of a machine follow each
    other."""
    speed = {ranks: sum(space.proportional[r] for r in ranks) for ranks in units}
    fastest = sorted(units, key=lambda ranks: -speed[ranks])
    kind_of = {ranks: _kind(space, ranks) for ranks in units}
    for count in range(min(len(units), MOST_STAGES), 1, -1):
        chosen = fastest[:count]
        machines: dict[int, list[Ranks]] = {}
        for ranks in sorted(chosen):
            machines.setdefault(space.costs.cluster.machine_index_of(ranks[0]), []).append(ranks)
        seen: set[tuple] = set()
        for order in islice(permutations(machines.values()), 50 * ORDERS):
            alike = tuple(tuple(kind_of[ranks] for ranks in machine) for machine in order)
            if alike not in seen and len(seen) < ORDERS:
                seen.add(alike)
                yield tuple(ranks for machine in order for ranks in machine)


def _kind(space: Space, ranks: Ranks) -> tuple:
    """A key that is equal for ranks on which a stage would take the same time."""
    cluster, first = space.costs.cluster, ranks[0]
    nic = cluster.machines[cluster.machine_index_of(first)].nic_bytes_per_s
    return nic, tuple(space.costs.class_of[r] for r in ranks)


class _Estimate:
    """Estimated seconds and bytes of stages, by their first group and the one after their last."""

    def __init__(self, task: Task, space: Space, part: float) -> None:
        self.task, self.space, self.costs = task, space, task.costs
        self.is_blocking = BLOCKING_SENDS in self.costs.unmeasured
        self.usable = [usable * part for usable in task.usable_bytes]
        self.constant = task.costs.memory_constants_bytes()
        groups = space.groups
        classes = range(len(task.costs.classes))
        # for each class, the fixed seconds and the further seconds of the whole batch
        self.fixed = [_between([g.forward[c][0] + g.backward[c][0] for g in groups]) for c in classes]
        self.slope = [_between([g.forward[c][1] + g.backward[c][1] for g in groups]) for c in classes]
        states = 2 + task.optimizer_states.kept  # includes the parameter and its gradient
        self.params = _between([g.param_bytes for g in groups])
        self.stored = self.params * states
        self.kept = _between([g.kept_bytes for g in groups])
        self.passing = _largest([g.passing_bytes for g in groups])
        self.no_s = np.zeros(len(groups) + 1)
        self._links: dict[tuple, tuple[float, float]] = {}
        self._shares: dict[tuple[Ranks, int], tuple[int, ...]] = {}
        self._stages: dict[tuple[Ranks, int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._borders: dict[tuple[Ranks, Ranks, int], np.ndarray] = {}
        # arrangements of the same stages share most of these; each is a matrix, so only some are kept
        self.cost = lru_cache(maxsize=MOST_KEPT)(self._cost)

    @lazy
    def crossing(self) -> np.ndarray:
        """Bytes of the whole batch that cross each border."""
        out = np.zeros(len(self.space.groups) + 1)
        for value in self.space.grouping.values:
            out[value.source + 1 : max(value.targets) + 1] += value.size_bytes
        return out

    @lazy
    def is_forbidden(self) -> np.ndarray:
        """Whether a value crosses each border that depends on parameters and is not cut between samples: a
        sum over samples, to which all micro-batches add, or what all samples share."""
        out = np.zeros(len(self.space.groups) + 1, dtype=bool)
        program, group_of = self.space.program, self.space.grouping.group_of
        made_in: dict[str, int] = {}  # the groups of such values, and of what communication makes of them
        for i in program.instructions:
            group = next((group_of[name] for name in i.results if name in group_of), None)
            for name in i.inputs:
                if name not in made_in:
                    continue
                if i.is_redistribution:
                    made_in[i.result] = made_in[name]
                elif group is not None:
                    out[made_in[name] + 1 : group + 1] = True
            if group is not None:
                values = (n for n, t in zip(i.results, i.types) if not isinstance(t.placement, Shard))
                made_in.update((n, group) for n in values if n in program.requires_grad)
        return out

    def shares(self, ranks: Ranks, size: int) -> tuple[int, ...]:
        """Samples of a micro-batch for each rank of the stage ``ranks``."""
        key = ranks, size
        if key not in self._shares:
            self._shares[key] = shard_sizes(size, self.space.shares(ranks))
        return self._shares[key]

    def stage(self, ranks: Ranks, size: int, flying: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a micro-batch on ``ranks`` for each pair of borders, and whether the memory for
        ``flying`` micro-batches suffices there."""
        key = ranks, size, flying
        if key not in self._stages:
            count, counts = len(self.space.groups), self.shares(ranks, size)
            stage_s = np.zeros((count + 1, count + 1))
            fits = np.tri(count + 1, k=-1, dtype=bool).T  # at least one group
            for r in ranks:
                c, share = self.costs.class_of[r], counts[r] / self.space.batch
                adding = self.costs.accumulation_s(r, 1.0) * self.params
                stage_s = np.maximum(stage_s, self.fixed[c] + self.slope[c] * share + adding)
                held = self.constant[r] + self.stored + (flying * self.kept + self.passing) * share
                fits &= held <= self.usable[r]
            self._stages[key] = stage_s, fits
        return self._stages[key]

    def _cost(
        self, source: Ranks | None, ranks: Ranks, target: Ranks | None, micro_steps: int, flying: int
    ) -> np.ndarray:
        """Seconds that a micro-batch holds the stage ``ranks`` or the transfers with the stages before and
        after it, for each pair of borders: gradients go back, activations go forward. Infinite where the
        memory for ``flying`` micro-batches is short."""
        held_s, fits = self.stage(ranks, self.space.batch // micro_steps, flying)
        before_s = self.border(source, ranks, micro_steps)[:, None]
        if self.is_blocking:
            held_s = held_s + before_s + self.border(ranks, target, micro_steps)
        return np.where(fits, np.maximum(held_s, before_s), np.inf)

    def border(self, source: Ranks | None, target: Ranks | None, micro_steps: int) -> np.ndarray:
        """Seconds of a transfer of a micro-batch from a stage to the next, for each border; infinite where no
        pipeline may be cut. Zero before the first stage and after the last."""
        if source is None or target is None:
            return self.no_s
        key = source, target, micro_steps
        if key not in self._borders:
            size = self.space.batch // micro_steps
            held, wanted = self.shares(source, size), self.shares(target, size)
            fixed, per_byte = self._link(source, held, target, wanted)
            transfer_s = fixed + per_byte * self.crossing / micro_steps
            self._borders[key] = np.where(self.is_forbidden, np.inf, transfer_s)
        return self._borders[key]

    def floor_s(self, units: Sequence[Ranks], micro_steps: int) -> float:
        """A rough lower bound over all borders between these stages: the fastest stages, any number of them,
        take equally long, and the others get nothing."""
        size = self.space.batch // micro_steps
        whole_s = sorted([float(self.stage(ranks, size, 1)[0][0, -1]) for ranks in units])
        rates = accumulate([1 / max(s, 1e-12) for s in whole_s])
        return min([(micro_steps - 1 + count) / rate for count, rate in enumerate(rates, 1)])

    def fastest(self, every: Sequence[tuple[Ranks, ...]], micro_steps: int, below_s: float) -> Chain | None:
        """The chain with the shortest estimate, if that is ``below_s``; None if nothing fits."""
        best = None
        floors = [self.floor_s(units, micro_steps) for units in every]
        for n in sorted(range(len(every)), key=lambda n: floors[n]):
            if floors[n] >= below_s:
                break
            chain = self.best(every[n], micro_steps, below_s)
            if chain is not None and chain.step_s < below_s:
                best, below_s = chain, chain.step_s
        return best

    def best(self, units: Sequence[Ranks], micro_steps: int, below_s: float) -> Chain | None:
        """The borders for which the slowest stage or transfer is shortest; None if nothing fits, or if the
        estimate is surely not ``below_s``."""
        size = self.space.batch // micro_steps
        shares = [self.shares(ranks, size) for ranks in units]
        if any(not counts[r] for ranks, counts in zip(units, shares) for r in ranks):
            return None
        around = (None, *units, None)
        costs = []
        for n, ranks in enumerate(units):
            target = around[n + 2] if self.is_blocking else None  # else it makes no difference
            costs.append(self.cost(around[n], ranks, target, micro_steps, min(len(units) - n, micro_steps)))
        ends, slowest_s = borders(costs)
        # every micro-batch takes at least this long, one after another
        if micro_steps * slowest_s >= below_s:
            return None
        starts = (0, *ends)
        stages_s = [float(self.stage(r, size, 1)[0][a, b]) for r, a, b in zip(units, starts, ends)]
        arriving = [self.border(source, ranks, micro_steps) for source, ranks in zip(around, units)]
        arriving_s = [float(transfer_s[a]) for transfer_s, a in zip(arriving, starts)]
        step_s = through_s(stages_s, arriving_s, slowest_s, micro_steps)
        if step_s >= below_s:
            return None
        step_s += self._end_s(units, starts, ends, stages_s, arriving_s)
        return Chain(micro_steps, tuple(shares), ends, float(step_s))

    def _end_s(
        self,
        units: Sequence[Ranks],
        starts: Sequence[int],
        ends: Sequence[int],
        stages_s: Sequence[float],
        arriving_s: Sequence[float],
    ) -> float:
        """Seconds after all passes for summing and stepping gradients. A stage sums during its last backward
        pass, except for its last gradients, and during those of the stages before it."""
        longest_s, before_s = 0.0, 0.0
        for ranks, start, end, stage_s, arriving in zip(units, starts, ends, stages_s, arriving_s):
            size = float(self.params[start, end])
            summed_s = Exchange("all_reduce", round(size), ranks).seconds(self.costs)
            stepped_s = max(self.costs.optimizer_s(r, size) for r in ranks)
            exposed_s = max(summed_s - BACKWARD * stage_s, LAST * summed_s)
            before_s += arriving
            longest_s = max(longest_s, exposed_s + stepped_s - before_s)
            before_s += BACKWARD * stage_s
        return longest_s

    def _link(self, source: Ranks, held: tuple, target: Ranks, wanted: tuple) -> tuple[float, float]:
        """Seconds of a transfer between two stages: fixed, and per byte."""
        key = source, held, target, wanted
        if key not in self._links:
            ranks = tuple(sorted({*source, *target}))
            parts = [tuple(n / sum(counts) for n in counts) for counts in (held, wanted)]
            sent = sent_between(*parts)
            small, large = (
                Exchange("all_to_all", size, ranks, sent).seconds(self.costs) for size in (2**20, 2**24)
            )
            per_byte = max(large - small, 0.0) / (2**24 - 2**20)
            self._links[key] = max(small - per_byte * 2**20, 0.0), per_byte
        return self._links[key]


def through_s(
    stages_s: Sequence[float], arriving_s: Sequence[float], slowest_s: float, micro_steps: int
) -> float:
    """Seconds of all passes of a pipeline in 1F1B order, from those of a micro-batch in each stage and of its
    transfers to the stage.

    One micro-batch goes through all stages. The others follow at the pace of the slowest stage or transfer,
    or of several consecutive stages: n of these hold at most n micro-batches at a time, so n micro-batches
    take as long as one takes through these stages and back.
    """
    count = len(stages_s)
    once_s = sum(stages_s) + 2 * sum(arriving_s)
    longest_s = once_s + (micro_steps - 1) * slowest_s
    for first in range(count):
        round_s = stages_s[first]
        for stage in range(first + 1, count):
            round_s += 2 * arriving_s[stage] + stages_s[stage]
            some = stage + 1 - first
            longest_s = max(longest_s, once_s + max(micro_steps / some - 1, 0.0) * round_s)
    return longest_s


def borders(costs: Sequence[np.ndarray]) -> tuple[tuple[int, ...], float]:
    """The ends of the stages for which the largest cost is smallest, and that cost: ``costs[s][a, b]`` is the
    cost of stage s with the groups from a up to but not including b. It is infinite if every choice is."""
    last = len(costs[0]) - 1
    best = np.full(last + 1, np.inf)
    best[0] = 0.0
    before = []
    for cost in costs:
        before.append(best)
        best = np.maximum(best[:, None], cost).min(axis=0)
    ends, at = [], last
    for reached, cost in zip(reversed(before), reversed(costs)):
        ends.append(at)
        at = int(np.maximum(reached, cost[:, at]).argmin())
    return tuple(reversed(ends)), float(best[last])


def _between(values: Sequence[float]) -> np.ndarray:
    """The sums of all ranges, by (first, one after the last)."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[None, :] - sums[:, None]


def _largest(values: Sequence[float]) -> np.ndarray:
    """The largest values of all ranges, by (first, one after the last)."""
    count = len(values)
    out = np.zeros((count + 1, count + 1))
    for a in range(count):
        out[a, a + 1 :] = np.maximum.accumulate(values[a:])
    return out
