"""The links that collectives share: the NIC of every machine, out and in, and the link inside each machine.

A collective crosses the NICs of its machines if they are several, and the link of every machine in which
two of its ranks sit. The traffic is that of the algorithms behind ``ring_fit``: a ring over the ranks in
order, a chain for broadcast and reduce, every pair on its own for all_to_all and direct sums.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ..cluster import Cluster
from .collectives import DIRECT, FLAT

Link = tuple[str, int]  # "out", "in" or "inside", and the machine


def links_of(cluster: Cluster, ranks: tuple[int, ...]) -> frozenset[Link]:
    """All that collectives between ``ranks`` may cross."""
    sizes = Counter(map(cluster.machine_index_of, ranks))
    inside = {("inside", m) for m, count in sizes.items() if count > 1}
    nics = {(way, m) for m in sizes for way in ("out", "in")} if len(sizes) > 1 else set()
    return frozenset(inside | nics)


def link_s_per_byte(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> dict[Link, float]:
    """Seconds for which a collective occupies each link, per byte of the whole tensor.

    Inside a machine every device has a way of its own to its neighbour, so that one collective's hops do
    not add up there; those of different collectives do. Raises ValueError for an unknown collective.
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
    return {link: share / _bytes_per_s(cluster, link) for link, share in load.items()}


def _hops(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> dict[Link, float]:
    n = len(ranks)
    hops = list(zip(ranks, ranks[1:] + ranks[:1]))
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
            load["inside", here] = carried
        else:
            load["out", here] += carried
            load["in", there] += carried
    return load


def _by_levels(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> dict[Link, float]:
    """All bytes to the first rank of each machine, between these, and back; or one way, between owners."""
    sizes = Counter(map(cluster.machine_index_of, ranks))
    ways = 2.0 if collective == "all_reduce" else 1.0
    load: dict[Link, float] = {("inside", m): ways for m, count in sizes.items() if count > 1}
    between = ways * (len(sizes) - 1) / len(sizes)
    return load | {(way, m): between for m in sizes for way in ("out", "in") if len(sizes) > 1}


def _pairs(cluster: Cluster, ranks: tuple[int, ...], part: float) -> dict[Link, float]:
    """Each rank sends each other one the same part of the whole tensor."""
    n = len(ranks)
    load: dict[Link, float] = {}
    for m, count in Counter(map(cluster.machine_index_of, ranks)).items():
        if count > 1:
            load["inside", m] = (count - 1) * part
        if count < n:
            load["out", m] = load["in", m] = count * (n - count) * part
    return load


Sent = tuple[tuple[int, int, float], ...]  # from rank, to rank, share of the whole tensor


def sent_s_per_byte(cluster: Cluster, sent: Sent) -> dict[Link, float]:
    """As ``link_s_per_byte``, where ranks send each other what is ``sent``."""
    load: dict[Link, float] = defaultdict(float)
    ways: dict[tuple[str, int], float] = defaultdict(float)  # for each device, within its machine
    for a, b, share in sent:
        here, there = cluster.machine_index_of(a), cluster.machine_index_of(b)
        if here == there:
            ways["out", a] += share
            ways["in", b] += share
        else:
            load["out", here] += share
            load["in", there] += share
    for (_, rank), share in ways.items():
        link = ("inside", cluster.machine_index_of(rank))
        load[link] = max(load[link], share)
    return {link: share / _bytes_per_s(cluster, link) for link, share in load.items()}


def _bytes_per_s(cluster: Cluster, link: Link) -> float:
    machine = cluster.machines[link[1]]
    return machine.link_bytes_per_s if link[0] == "inside" else machine.nic_bytes_per_s
