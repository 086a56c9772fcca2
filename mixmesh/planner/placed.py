"""Places groups of operators on devices: model parallelism, and a local search over all strategies of a
``Space``."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..lang.ir import make_ratio, support
from ..search.evaluate import Evaluator, Fidelity, Measure, Strategy
from ..search.placement import Action, Estimator, Placed, Space
from .passes.shares import whole_counts
from .pipelines import pipelines
from .proposal import Proposal
from .spaces import space_of
from .task import Task

FILLED = (1.0, 0.85, 0.7)  # shares of a device's memory that a cut by memory fills with estimated bytes
# shares of usable memory, for a search whose estimates are off by a few per cent
TIGHTENED = (1.0, 0.93, 0.85)
MAX_EVALUATIONS = 3000
MAX_SIMULATIONS = 40
JUDGED = 6  # number of strategies that are simulated after a search
LONGEST = 12  # limit on the groups that one move of the search changes together


def model_parallel(task: Task) -> Iterator[Proposal]:
    """Groups in order, cut once between each two units: devices, or sets of equal devices in a machine,
    within which they run data parallel. Then the same in micro-batches."""
    yield from cut(task)
    yield from pipelines(task, "model-parallel")


def cut(task: Task) -> Iterator[Proposal]:
    """Groups in order, cut once between each two units, without micro-batches."""
    space = space_of(task)
    for strategy in dict.fromkeys(cuts(space, task)):
        yield judged(task, "model-parallel", space, strategy)


def judged(task: Task, planner: str, space: Space, strategy: Sequence[Action | Placed]) -> Proposal:
    """Simulates a strategy and returns it as a proposal."""
    with task.timed("lower"):
        program = space.lower(strategy)
    return task.best_buckets(planner, program)


def cuts(space: Space, task: Task) -> Iterator[Strategy]:
    """Contiguous cuts over devices and over device groups: in proportion to speed, in the order of the ranks;
    and as much as fits on the fastest first."""
    single = [(rank,) for rank in range(task.world_size)]
    usable = task.usable_bytes
    estimate = Estimator(space, task.optimizer_states, task.levels)
    for units in dict.fromkeys((space.device_groups, tuple(single))):
        if len(units) > 1:
            yield by_speed(space, units)
        fastest_first = sorted(units, key=lambda ranks: -sum(space.proportional[r] for r in ranks))
        for part in FILLED:
            division = by_memory(space, fastest_first, estimate, [size * part for size in usable])
            if division is not None:
                yield division


def by_speed(space: Space, units: Sequence[tuple[int, ...]]) -> Strategy:
    """Gives every unit groups whose seconds are in proportion to its speed."""
    placed = [Placed(space.shares(ranks)) for ranks in units]
    ends, total = [], 0.0
    for ranks in units:
        total += sum(space.proportional[r] for r in ranks)
        ends.append(total)
    seconds = [sum(group.seconds) for group in space.groups]
    whole, passed_s, n, out = sum(seconds), 0.0, 0, []
    for s in seconds:
        while n + 1 < len(units) and passed_s + s / 2 > ends[n] * whole:
            n += 1
        out.append(placed[n])
        passed_s += s
    return tuple(out)


def by_memory(
    space: Space, units: Sequence[tuple[int, ...]], estimate: Estimator, usable: Sequence[float]
) -> Strategy | None:
    """Gives every unit groups until its memory is full; None if all are full before the end."""
    left = iter(units)
    ranks = next(left)
    placed = Placed(space.shares(ranks))
    held = [float(size) for size in estimate.constant]
    out: list[Placed] = []
    for k in range(len(space.groups)):
        while True:
            more = list(estimate.held_bytes(k, placed))
            if all(held[r] + stays + passing <= usable[r] for r, stays, passing in more):
                break
            unit = next(left, None)
            if unit is None:
                return None
            ranks, placed = unit, Placed(space.shares(unit))
        for rank, stays, _ in more:
            held[rank] += stays
        out.append(placed)
    return tuple(out)


# --- local search -----------------------------------------------------------------------------------------


def placed(task: Task) -> Iterator[Proposal]:
    """A local search by the estimate, continued from its best results by the simulator; yields the best of
    these in their buckets. If nothing fits, the estimate is given less memory and the search repeated."""
    space = space_of(task)
    usable = task.usable_bytes
    states = task.optimizer_states
    simulated = Evaluator(space, Measure(space, states, usable, Fidelity.SIMULATED))
    end_s = time.perf_counter() + task.budget.search_s
    for part in TIGHTENED:
        task.progress(f"planning: placed, local search in {part:.0%} of memory")
        with task.timed("placement"):
            max_s = (end_s - time.perf_counter()) / 2
            estimated = local_search(task, space, usable=[size * part for size in usable], max_s=max_s)
            # estimates of uniform strategies share one error, so the best of them is simulated in any case
            alike = min(dict.fromkeys(uniform(space)), key=lambda strategy: estimated(strategy).penalised)
            for strategy in (*estimated.least_penalised(JUDGED), estimated.cheapest(), alike):
                simulated(strategy)
            max_s = (end_s - time.perf_counter()) / 2
            climb(simulated, MOVES, MAX_SIMULATIONS, max_s, random.Random(0))
        if simulated(*simulated.least_penalised(1)).fits:
            break
    for strategy in simulated.least_penalised(JUDGED // 2):
        yield judged(task, "placed", space, strategy)


def local_search(
    task: Task,
    space: Space,
    *,
    usable: Sequence[float] | None = None,
    max_evaluations: int = MAX_EVALUATIONS,
    max_s: float = math.inf,
) -> Evaluator:
    """Changes runs of groups of the best strategy as long as the estimate improves. Begins with the best of
    data parallelism, single devices and contiguous cuts. ``usable`` is each rank's memory; by default
    everything except the headroom."""
    memory = tuple(usable or task.usable_bytes)
    evaluate = Evaluator(space, Measure(space, task.optimizer_states, memory, levels=task.levels))
    for strategy in (*cuts(space, task), *uniform(space)):
        evaluate(strategy)
    climb(evaluate, MOVES, max_evaluations, max_s, random.Random(0))
    return evaluate


Move = Callable[[Space, Strategy, random.Random], Strategy]


def climb(
    evaluate: Evaluator, moves: Sequence[Move], max_evaluations: int, max_s: float, draw: random.Random
) -> None:
    """Makes random moves from the best strategy; keeps each one that makes the strategy better."""
    started = time.perf_counter()
    best = evaluate.cheapest()
    least_s = evaluate(best).penalised[1]
    for _ in range(max_evaluations):
        if time.perf_counter() - started > max_s:
            break
        other = draw.choice(moves)(evaluate.space, best, draw)
        cost_s = evaluate(other).penalised[1]
        if cost_s < least_s:
            best, least_s = other, cost_s


def uniform(space: Space) -> Iterator[Strategy]:
    """Strategies with the same choice for all groups, one per possible choice."""
    heaviest = max(range(len(space.groups)), key=lambda k: space.groups[k].param_bytes)
    for action in space.actions(heaviest):
        yield tuple(fitted(space, k, action.placed) for k in range(len(space.groups)))


def fitted(space: Space, k: int, placed: Placed) -> Placed:
    """A choice made for another group, adapted to group ``k``, which may have nothing to synchronise."""
    if not space.groups[k].param_bytes:
        return Placed(placed.ratio)
    if placed.sync != "ps":
        return placed
    return Placed(placed.ratio, "ps", space.root(support(placed.ratio), k))


def replaced(space: Space, strategy: Strategy, draw: random.Random) -> Strategy:
    """A run of groups with one other choice, taken from the space or from those in use."""
    first = draw.randrange(len(strategy))
    last = min(len(strategy), first + draw.randint(1, LONGEST))
    new = draw.choice((draw.choice(strategy), draw.choice(space.actions(first)).placed))
    return tuple(fitted(space, k, new) if first <= k < last else kept for k, kept in enumerate(strategy))


def shifted(space: Space, strategy: Strategy, draw: random.Random) -> Strategy:
    """A sample moved from one rank to another, in all groups of one ratio."""
    ratio = draw.choice(strategy).ratio
    counts = list(whole_counts(ratio, space.batch))
    giver, taker = draw.choice(support(ratio)), draw.choice(support(ratio))
    if counts[giver] < 2:
        return strategy
    counts[giver] -= 1
    counts[taker] += 1
    other = make_ratio(counts)
    return tuple(replace(p, ratio=other) if p.ratio == ratio else p for p in strategy)


MOVES = (replaced, replaced, shifted)
