"""The links that collectives share: the NIC of every machine, out and in, and the links inside each machine.

A collective crosses the NICs of its machines if there are several, and inside each machine the links between
consecutive ranks. The traffic is that of the algorithms behind ``ring_fit``: a ring over the ranks
(``ring_order``), a chain for broadcast and reduce, every pair separately for all_to_all and direct sums. Two
devices of a machine have their own link or a path through the machine; if it has a host bridge, all paths
through it share its rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..base.timeline import BRIDGE, IN, INSIDE, OUT, OWN, Link
from ..cluster import Cluster
from .names import DIRECT, FLAT


def links_of(cluster: Cluster, ranks: tuple[int, ...]) -> frozenset[Link]:
    """All links that collectives between ``ranks`` may cross."""
    parts = cluster.by_machine(ranks)
    inside = {
        way_of(cluster, a, b)
        for m, mine in parts.items()
        if len(mine) > 1
        for a, b in _every_pair(mine, cluster, m)
    }
    nics = {Link(way, m) for m in parts for way in (OUT, IN)} if len(parts) > 1 else set()
    return frozenset(inside | nics)


def _every_pair(ranks: Sequence[int], cluster: Cluster, m: int) -> Iterable[tuple[int, int]]:
    """Pairs of ranks of a machine, one for each link that may join two of them."""
    if not cluster.machines[m].links:
        return [(ranks[0], ranks[1])]
    return [(a, b) for a in ranks for b in ranks if a < b]


def way_of(cluster: Cluster, a: int, b: int) -> Link:
    """The link through which two ranks of a machine reach each other."""
    m = cluster.machine_index_of(a)
    machine, first = cluster.machines[m], cluster.ranks_of(m)[0]
    number = machine.link_between(a - first, b - first) if machine.links else None
    if number is not None:
        return Link(OWN, m, number)
    return Link(INSIDE if machine.bridge_bytes_per_s is None else BRIDGE, m)


def link_s_per_byte(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> dict[Link, float]:
    """Seconds for which a collective occupies each link, per byte of the whole tensor.

    Inside a machine every device has its own path to its neighbour, so hops of one collective do not add up
    there, except through a host bridge; hops of different collectives do. Raises ValueError for an unknown
    collective.
    """
    if len(ranks) < 2:
        return {}
    if collective in ("all_to_all", DIRECT):
        part = 1.0 if collective == DIRECT else 1 / len(ranks) ** 2
        load = _pairs(cluster, ranks, part)
    elif collective in FLAT:
        load = _by_levels(cluster, FLAT[collective], ranks)
    else:
        load = _hops(cluster, collective, ranks)
    return {link: share / bytes_per_s_of(cluster, link) for link, share in load.items()}


def bridge_s_per_byte(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> float:
    """The seconds on the busiest host bridge among these; 0 without any."""
    if all(cluster.machines[m].bridge_bytes_per_s is None for m in cluster.by_machine(ranks)):
        return 0.0
    busy = link_s_per_byte(cluster, collective, ranks)
    return max((s for link, s in busy.items() if link.way == BRIDGE), default=0.0)


def ring_order(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks in the order of a ring in which ranks of a machine that share a link are neighbours:
    libraries look for the ring with the fewest slow hops."""
    if not any(cluster.machines[m].links for m in cluster.by_machine(ranks)):
        return ranks
    left, out = list(ranks), [ranks[0]]
    left.remove(ranks[0])
    while left:
        here = cluster.machine_index_of(out[-1])
        near = [r for r in left if cluster.machine_index_of(r) == here]
        linked = [r for r in near if cluster.link_between(out[-1], r) is not None]
        out.append((linked or near or left)[0])
        left.remove(out[-1])
    return tuple(out)


def _add(load: dict[Link, float], cluster: Cluster, a: int, b: int, share: float) -> None:
    """Adds the load of one hop of a ring or chain inside a machine."""
    link = way_of(cluster, a, b)
    load[link] = load.get(link, 0.0) + share if link.way == BRIDGE else max(load.get(link, 0.0), share)


def _hops(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> dict[Link, float]:
    n, order = len(ranks), ring_order(cluster, ranks)
    hops = list(zip(order, order[1:] + order[:1]))
    match collective:
        case "all_reduce":
            carried = 2 * (n - 1) / n
        case "all_gather" | "reduce_scatter":
            carried = (n - 1) / n
        case "broadcast" | "reduce":
            carried, hops = 1.0, hops[:-1]
        case _:
            raise ValueError(f"unknown collective {collective!r}")
    load: dict[Link, float] = defaultdict(float)
    for a, b in hops:
        here, there = cluster.machine_index_of(a), cluster.machine_index_of(b)
        if here == there:
            _add(load, cluster, a, b, carried)
        else:
            load[Link(OUT, here)] += carried
            load[Link(IN, there)] += carried
    return load


def _by_levels(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> dict[Link, float]:
    """The loads of a hierarchical collective: all bytes to the first rank of each machine, between these, and
    back; or one way, between owners."""
    by_machine = cluster.by_machine(ranks)
    ways = 2.0 if collective == "all_reduce" else 1.0
    load: dict[Link, float] = {}
    for mine in by_machine.values():
        order = ring_order(cluster, mine)
        for a, b in zip(order, order[1:]):
            _add(load, cluster, a, b, ways)
    between = ways * (len(by_machine) - 1) / len(by_machine)
    return load | {Link(way, m): between for m in by_machine for way in (OUT, IN) if len(by_machine) > 1}


def _pairs(cluster: Cluster, ranks: tuple[int, ...], part: float) -> dict[Link, float]:
    """The loads if each rank sends every other one the same part of the whole tensor."""
    n = len(ranks)
    load: dict[Link, float] = {}
    for m, mine in cluster.by_machine(ranks).items():
        count = len(mine)
        if count > 1 and _is_plain(cluster, m):
            load[Link(INSIDE, m)] = (count - 1) * part
        elif count > 1:
            load |= _sent_inside(cluster, ((a, b, part) for a in mine for b in mine if a != b))
        if count < n:
            load[Link(OUT, m)] = load[Link(IN, m)] = count * (n - count) * part
    return load


def _is_plain(cluster: Cluster, m: int) -> bool:
    return not cluster.machines[m].links and cluster.machines[m].bridge_bytes_per_s is None


Sent = tuple[tuple[int, int, float], ...]  # (from rank, to rank, share of the whole tensor)


def sent_s_per_byte(cluster: Cluster, sent: Sent) -> dict[Link, float]:
    """Like ``link_s_per_byte``, for what ranks have ``sent`` each other."""
    load: dict[Link, float] = defaultdict(float)
    inside = []
    for a, b, share in sent:
        here, there = cluster.machine_index_of(a), cluster.machine_index_of(b)
        if here == there:
            inside.append((a, b, share))
        else:
            load[Link(OUT, here)] += share
            load[Link(IN, there)] += share
    load |= _sent_inside(cluster, inside)
    return {link: share / bytes_per_s_of(cluster, link) for link, share in load.items()}


def _sent_inside(cluster: Cluster, sent: Iterable[tuple[int, int, float]]) -> dict[Link, float]:
    """Loads of what is sent within machines: each device has its own path onto a link, but all share a
    bridge."""
    ways: dict[tuple[Link, str, int], float] = defaultdict(float)
    load: dict[Link, float] = defaultdict(float)
    for a, b, share in sent:
        link = way_of(cluster, a, b)
        if link.way == BRIDGE:
            load[link] += share
        else:
            ways[link, OUT, a] += share
            ways[link, IN, b] += share
    for (link, _, _), share in ways.items():
        load[link] = max(load[link], share)
    return load


def bytes_per_s_of(cluster: Cluster, link: Link) -> float:
    """The rate of a link."""
    machine = cluster.machines[link.machine]
    if link.number is not None:
        return machine.links[link.number].bytes_per_s
    if link.way == BRIDGE:
        assert machine.bridge_bytes_per_s is not None  # see way_of
        return machine.bridge_bytes_per_s
    return machine.link_bytes_per_s if link.way == INSIDE else machine.nic_bytes_per_s
