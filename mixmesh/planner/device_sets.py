"""Sets of devices that may be faster than all devices together: a plan may leave some of them idle.

Machines with equal devices and links can stand in for each other, so only the number of each kind in a set
matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod

from ..cost.exchanges import Exchange
from .task import Task

Ranks = tuple[int, ...]

# up to this many sets of machines are all tried; otherwise only the first 1, 2, 4, ... machines
MOST_SETS = 16
# factor on the estimated least step on some devices: steps 6 % shorter than that were found
ABOUT = 0.9


def machine_sets(task: Task) -> list[Ranks]:
    """Sets of whole machines, one for each combination of kinds. If there are many, only sets of the fastest
    machines, of those with the fastest links, and of each kind."""
    cluster = task.costs.cluster
    mine = set(task.ranks)
    numbers = range(len(cluster.machines))
    machines = [tuple(r for r in cluster.ranks_of(m) if r in mine) for m in numbers]
    kinds: dict[tuple, list[Ranks]] = {}
    for machine, ranks in zip(cluster.machines, machines):
        if ranks:
            classes = tuple(task.costs.class_of[r] for r in ranks)
            kinds.setdefault((classes, *machine.wiring), []).append(ranks)
    alike = list(kinds.values())
    chosen: list[Sequence[Ranks]]
    if prod(len(some) + 1 for some in alike) <= MOST_SETS:
        counts = product(*[range(len(some), -1, -1) for some in alike])
        chosen = [[ranks for some, n in zip(alike, count) for ranks in some[:n]] for count in counts]
    else:
        chosen = [first for order in _orders(task, kinds) for first in _firsts(order)]
    sets = (tuple(sorted(r for ranks in some for r in ranks)) for some in chosen)
    return [ranks for ranks in dict.fromkeys(sets) if ranks]


def _orders(task: Task, kinds: dict[tuple, list[Ranks]]) -> Iterator[list[Ranks]]:
    """Yields orders of machines: fastest first, fastest link between machines first, and the machines of each
    kind."""
    every = [(kind, ranks) for kind, some in kinds.items() for ranks in some]
    shares = task.proportional
    speed: Callable[[Ranks], float] = lambda ranks: -sum(shares[r] for r in ranks)  # noqa: E731
    yield [ranks for _, ranks in sorted(every, key=lambda pair: speed(pair[1]))]
    yield [ranks for _, ranks in sorted(every, key=lambda pair: (-pair[0][-2], speed(pair[1])))]
    yield from kinds.values()


def _firsts(order: Sequence[Ranks]) -> Iterator[Sequence[Ranks]]:
    """The first machine, the first two, four, …, all machines."""
    count = 1
    while count < len(order):
        yield order[:count]
        count *= 2
    yield order


def device_sets(task: Task) -> list[Ranks]:
    """All devices, sets of machines, the close devices of these, and each of these without the slowest class
    of devices, without the two slowest, …: leaving out devices is always legal."""
    class_of, shares = task.costs.class_of, task.proportional
    sets: dict[Ranks, None] = {}
    whole = dict.fromkeys((task.ranks, *machine_sets(task)))
    close = [fewer for ranks in whole for fewer in _close(task, ranks)]
    for ranks in (*whole, *close):
        fastest_first = sorted(ranks, key=lambda r: -shares[r])
        order = list(dict.fromkeys(class_of[r] for r in fastest_first))
        for count in range(len(order), 0, -1):
            sets[tuple(r for r in ranks if class_of[r] in order[:count])] = None
    alone: dict[int, Ranks] = {}
    for r in task.ranks:
        alone.setdefault(class_of[r], (r,))
    return _unlike(task, [*sets, *alone.values()])


def _close(task: Task, ranks: Ranks) -> Iterator[Ranks]:
    """Yields fewer devices of every machine, those that exchange faster alone than with the others."""
    cluster = task.costs.cluster
    machines = [_close_within(task, m, mine) for m, mine in cluster.by_machine(ranks).items()]
    for n in range(1, max(map(len, machines))):
        yield tuple(sorted(r for ways in machines for r in ways[min(n, len(ways) - 1)]))


def _close_within(task: Task, number: int, mine: Ranks) -> list[Ranks]:
    """All of a machine's devices ``mine``, those with a link of their own, and the fastest two, three, …
    where all share a bridge, which then carries less."""
    machine, first = task.costs.cluster.machines[number], task.costs.cluster.ranks_of(number)[0]
    ways = {mine: None}
    for link in machine.links:
        ways[tuple(r for r in mine if r - first in link.devices)] = None
    if machine.bridge_bytes_per_s is not None:
        fastest_first = sorted(mine, key=lambda r: -task.proportional[r])
        ways |= {tuple(sorted(fastest_first[:count])): None for count in range(2, len(mine))}
    return [ranks for ranks in ways if len(ranks) > 1 or ranks == mine]


def sets_in_need(task: Task) -> list[Ranks]:
    """For each class, all devices outside of it: the memory of its devices may be too small."""
    class_of = task.costs.class_of
    classes = dict.fromkeys(class_of[r] for r in task.ranks)
    return [tuple(r for r in task.ranks if class_of[r] != c) for c in classes if len(classes) > 1]


def _unlike(task: Task, sets: Sequence[Ranks]) -> list[Ranks]:
    """One of each group of sets with the same number of devices of each class in machines with equal
    links."""
    cluster, class_of = task.costs.cluster, task.costs.class_of
    unlike: dict[tuple, Ranks] = {}
    for ranks in sets:
        held: dict[int, list[int]] = {}
        for r in ranks:
            held.setdefault(cluster.machine_index_of(r), []).append(r)
        parts = []
        for m, mine in held.items():
            machine, classes = cluster.machines[m], [class_of[r] for r in mine]
            # devices with links of their own cannot stand in for each other
            links = (*machine.wiring, str(mine) if machine.links else "")
            parts.append((tuple(classes), *(links if len(held) > 1 or len(classes) > 1 else ())))
        unlike.setdefault(tuple(sorted(parts)), ranks)
    return list(unlike.values())


def least_parallel_s(task: Task, ranks: Ranks) -> float:
    """A rough lower bound on the seconds of a data-parallel step on these devices: computing, and the busiest
    link's time for reducing all gradients, hierarchically or flat."""
    computing_s = task.least_seconds(ranks)
    if len(ranks) == 1:
        return computing_s
    levels = task.levels_on(ranks)
    ways = (False, True) if levels and levels.parts(ranks, task.gradient_bytes) else (False,)
    exchanges = [Exchange("all_reduce", task.gradient_bytes, ranks, levelled=way) for way in ways]
    return max(computing_s, min(busiest_link_s(task, exchange) for exchange in exchanges))


def busiest_link_s(task: Task, exchange: Exchange) -> float:
    """Seconds of the exchange on the link that carries the most of it."""
    return max(exchange.link_s_per_byte(task.costs.cluster).values()) * exchange.size_bytes
