"""Estimates seconds of collectives from the cluster file alone, and names the runtime's default algorithms.

``size_bytes`` is always that of the whole tensor. The estimate is a ring over the ranks in order: every byte
crosses the slowest link, which is a machine's NIC if the ring leaves the machine (Thakur et al.,
"Optimization of Collective Communication Operations in MPICH", 2005, section 3). gloo uses rings for tensors
of all sizes; NCCL sums small ones along trees (``tree_line``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..cluster import Cluster
from .names import COLLECTIVES, DIRECT, FLAT, LEVELLED, USUAL
from .resources import bridge_s_per_byte, ring_order

__all__ = [
    "COLLECTIVES", "DIRECT", "FLAT", "LEVELLED", "USUAL", "CollectiveFit", "default_algorithm", "fastest_of",
    "in_turn", "level_fits", "on_gpus", "ring_fit",
]  # fmt: skip
# Seconds of a hop of a small collective in addition to the wire's latency. gloo on the emulated testbed, four
# ranks in two machines: 1.2 ms for a broadcast, 2-4 for an all_to_all, 5-12 for an all_reduce of 4 KB.
# Elsewhere waking a thread takes some tens of microseconds, and NCCL's kernels wait without sleeping.
EMULATED_HOP_S = 1e-3
CPU_HOP_S = 5e-5
MESSAGE_S = 5e-6  # the sender's time for each further simultaneous message: NCCL posts them in turn
NCCL_TREE_RATE = (
    0.9  # share of a link's rate that NCCL's own model gives its trees (``busBw * .9``, src/graph/tuning.cc)
)
# Collectives of GPUs in several machines reach a share of the wire's rate. Over TCP, where the host's threads
# move NCCL's bytes (NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD), published measurements have 0.7 to 0.85,
# more for larger tensors, less for more machines: HAP's artifact has 0.72 for an all_reduce between eight. By
# RDMA 0.9 (nccl-tests on InfiniBand, as usually reported).
RDMA_SHARE = 0.9
TCP_SMALL_SHARE, TCP_LARGE_SHARE = 0.7, 0.85
TCP_SHARE_OF_DOUBLING = 0.05  # loss of rate for each doubling of the number of machines beyond two
TCP_LARGE_BYTES = 2**24  # tensors of at least this size are large
NCCL_MAX_SKEW = 2.0  # padding sends max/mean times as much as needed; beyond this, one transfer per piece


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """``latency_s + s_per_byte * size_bytes`` for all ranks together. If one algorithm is fastest for few
    bytes and another for many, each is one of the ``lines``, and the fields are the latency of the first and
    the slope of the last."""

    latency_s: float
    s_per_byte: float
    lines: tuple[tuple[float, float], ...] = ()

    def seconds(self, size_bytes: float, skew: float | None = None) -> float:
        """The seconds for ``size_bytes``. The ``skew`` of the pieces matters only to measured collectives,
        not here."""
        if not self.lines:
            return self.latency_s + self.s_per_byte * size_bytes
        return min([latency_s + s_per_byte * size_bytes for latency_s, s_per_byte in self.lines])

    @property
    def affine_lines(self) -> tuple[tuple[float, float], ...]:
        """The latency and the seconds per byte of each algorithm; the fastest counts."""
        return self.lines or ((self.latency_s, self.s_per_byte),)

    def algorithm(self, size_bytes: float, skew: float | None = None) -> str | None:
        """None, as nothing was measured: the runtime chooses."""
        return None


def default_algorithm(collective: str, backend: str, skew: float = 1.0) -> str:
    """The runtime's default algorithm for uneven pieces, at least two of which are not empty.

    These were fastest on gloo: one all_to_all, each piece sent to each rank. NCCL pads while the largest
    piece is at most twice the mean, and otherwise uses one broadcast per piece (grouped broadcasts of HAP,
    EuroSys'24, section 4.2) or one reduce. Empty for a collective with only one algorithm.
    """
    if collective not in ("all_gather", "reduce_scatter"):
        return ""
    if backend == "nccl" and skew <= NCCL_MAX_SKEW:
        return "padded"
    if backend == "gloo":
        return "all_to_all"
    return "broadcasts" if collective == "all_gather" else "reduces"


def fastest_of(lines: Iterable[tuple[float, float]]) -> CollectiveFit:
    """The fastest, at every size, of algorithms that are given as (latency_s, s_per_byte)."""
    kept: list[tuple[float, float]] = []
    for latency_s, s_per_byte in sorted(lines):
        if not kept or s_per_byte < kept[-1][1]:
            kept.append((latency_s, s_per_byte))
    return CollectiveFit(kept[0][0], kept[-1][1], tuple(kept) if len(kept) > 1 else ())


def in_turn(stages: Iterable[CollectiveFit]) -> CollectiveFit:
    """The cost of stages that run one after the other."""
    ways = itertools.product(*(f.affine_lines for f in stages))
    return fastest_of((sum(a for a, _ in way), sum(b for _, b in way)) for way in ways)


def ring_fit(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> CollectiveFit:
    """The estimate for ``collective`` over ``ranks`` from the links of the cluster: a ring, and between GPUs,
    for sums of few bytes, trees. ``send`` goes from the first of two ranks to the second. Between the GPUs of
    several machines a collective reaches a share of the wire's rate (``on_wire``)."""
    n = len(ranks)
    if n < 2:
        return CollectiveFit(0.0, 0.0)
    if collective in FLAT:
        return in_turn(level_fits(cluster, FLAT[collective], ranks))
    lines = _lines(cluster, collective, ranks)
    if on_gpus(cluster, ranks):
        machines = len(cluster.by_machine(ranks))
        lines = [line for each in lines for line in on_wire(cluster, machines, *each)]
    return fastest_of(lines)


def on_wire(
    cluster: Cluster, machines: int, latency_s: float, s_per_byte: float
) -> tuple[tuple[float, float], ...]:
    """Converts the line of a collective at the wire's full rate into what GPUs in ``machines`` reach: over
    TCP one line for small tensors and one for large ones."""
    if machines == 1:
        return ((latency_s, s_per_byte),)
    if cluster.network_kind == "rdma":
        return ((latency_s, s_per_byte / RDMA_SHARE),)
    large = max(TCP_LARGE_SHARE - TCP_SHARE_OF_DOUBLING * math.log2(machines / 2), TCP_SMALL_SHARE)
    slow, fast = s_per_byte / TCP_SMALL_SHARE, s_per_byte / large
    return (latency_s, slow), (latency_s + TCP_LARGE_BYTES * (slow - fast), fast)


def _lines(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Latency and seconds per byte of each algorithm, limited by the rate of a host bridge on the way."""
    name = "broadcast" if collective == "send" else collective
    bridge_s = bridge_s_per_byte(cluster, name, ranks)
    lines = _wire_lines(cluster, collective, ring_order(cluster, ranks))
    return [(latency_s, max(s_per_byte, bridge_s)) for latency_s, s_per_byte in lines]


def _wire_lines(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Like ``_lines``, with each hop at the rate of its own link."""
    n = len(ranks)
    slowest = min(cluster.bandwidth_between(a, b) for a, b in ring_of(ranks))
    through = through_s(cluster, ranks)
    machines = cluster.by_machine(ranks)
    match collective:
        case "direct_all_reduce":
            latency_s = slowest_hop_s(cluster, ranks) + (n - 2) * MESSAGE_S
            if len(machines) == 1:
                return [(latency_s, (n - 1) / slowest)]
            loads = _sent_out(cluster, ranks).items()
            return [(latency_s, max(count / cluster.machines[m].nic_bytes_per_s for m, count in loads))]
        case "all_reduce":
            ring = (2 * through, 2 * (n - 1) / n / slowest)
            return [ring, tree_line(cluster, ranks, slowest)] if on_gpus(cluster, ranks) else [ring]
        case "all_gather" | "reduce_scatter":
            return [(through, (n - 1) / n / slowest)]
        case "broadcast" | "reduce" | "send":
            return [(through, 1 / slowest)]
        case "all_to_all":
            if len(machines) == 1:
                return [(through, (n - 1) / n**2 / slowest)]
            load = max(_sent_out(cluster, ranks).values())
            return [((n - 1) * slowest_hop_s(cluster, ranks), load / n**2 / slowest)]
    raise ValueError(f"unknown collective {collective!r}")


def _sent_out(cluster: Cluster, ranks: tuple[int, ...]) -> dict[int, int]:
    """For each machine, the number of pieces that its NIC sends if each rank has one for every other rank."""
    sizes = Counter(map(cluster.machine_index_of, ranks))
    return {m: count * (len(ranks) - count) for m, count in sizes.items()}


def through_s(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    """The latency of a path from the first rank through all others to the last. Between GPUs each hop has its
    own link's latency, as in NCCL's model; between processes on CPUs, which wait for each other at each hop,
    every hop has the slowest one's."""
    if on_gpus(cluster, ranks):
        return sum(cluster.latency_between(a, b) for a, b in itertools.pairwise(ranks))
    return (len(ranks) - 1) * slowest_hop_s(cluster, ranks)


def slowest_hop_s(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    return max(cluster.latency_between(a, b) + hop_s(cluster, a, b) for a, b in ring_of(ranks))


def ring_of(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(ranks, ranks[1:] + ranks[:1]))


def tree_line(cluster: Cluster, ranks: tuple[int, ...], bytes_per_s: float) -> tuple[float, float]:
    """Latency and seconds per byte of a sum up and down a tree of machines, in each of which the ranks are a
    chain: 2 (ranks of a machine - 1) hops inside and 2 log2(machines) between.

    Two trees carry half of the bytes each, and a machine is an inner node of only one of them, so about 2
    bytes pass each NIC for every byte of the sum, whatever the number of machines (Sanders, Speck, Träff,
    "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009). The hops are those of
    ``ncclTopoTuneModel`` in NCCL's src/graph/tuning.cc; its log2 is rounded down, the depth of a tree is not.
    """
    sizes = Counter(map(cluster.machine_index_of, ranks))
    inside_s = max((k - 1) * cluster.machines[m].link_latency_s for m, k in sizes.items())
    depth = math.ceil(math.log2(len(sizes)))
    return 2 * (inside_s + depth * cluster.latency_s), 2 / (NCCL_TREE_RATE * bytes_per_s)


def on_gpus(cluster: Cluster, ranks: tuple[int, ...]) -> bool:
    return all(cluster.devices[r].kind == "gpu" for r in ranks)


def level_fits(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> tuple[CollectiveFit, ...]:
    """The stages of a hierarchical collective: between the leaders of machines, and to them, from them, or
    both."""
    parts = cluster.by_machine(ranks)
    # machines that are alike share one estimate
    alike = {_alike_key(cluster, m, part): part for m, part in parts.items()}
    within = [ring_fit(cluster, "reduce", part) for part in alike.values()]
    inside = CollectiveFit(max(f.latency_s for f in within), max(f.s_per_byte for f in within))
    between = ring_fit(cluster, collective, tuple(part[0] for part in parts.values()))
    return (between, inside, inside) if collective == "all_reduce" else (between, inside)


def _alike_key(cluster: Cluster, m: int, part: tuple[int, ...]) -> tuple:
    """A key of everything that the estimate of a collective between ranks of one machine depends on."""
    first, devices = cluster.ranks_of(m)[0], cluster.devices
    places = tuple([(r - first, devices[r].kind, devices[r].cpu_share is None) for r in part])
    return cluster.machines[m].wiring, places


def hop_s(cluster: Cluster, a: int, b: int) -> float:
    """Seconds that the two processes of a hop take to pass data on, in addition to the wire's."""
    kinds = {cluster.devices[r].kind for r in (a, b)}
    if "cpu" not in kinds:
        return 0.0
    emulated = any(cluster.devices[r].cpu_share is not None for r in (a, b))
    return EMULATED_HOP_S if emulated else CPU_HOP_S
