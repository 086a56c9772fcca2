"""What a collective costs: a latency and a bandwidth per collective, from a profile or from the links.

``size_bytes`` is always that of the whole tensor. From the cluster file alone the estimate is that of a
ring over the ranks in order: every byte crosses the slowest link, which is a machine's NIC as soon as
the ring leaves the machine (Thakur et al., "Optimization of Collective Communication Operations in
MPICH", 2005, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import Cluster

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """``latency_s + s_per_byte * size_bytes`` for all ranks together."""

    latency_s: float
    s_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * size_bytes


def ring_fit(cluster: Cluster, collective: str, ranks: tuple[int, ...]) -> CollectiveFit:
    """The estimate for ``collective`` over ``ranks`` from the links of the cluster."""
    n = len(ranks)
    if n < 2:
        return CollectiveFit(0.0, 0.0)
    hops = list(zip(ranks, ranks[1:] + ranks[:1]))
    slowest = min(cluster.bandwidth_between(a, b) for a, b in hops)
    latency = max(cluster.latency_between(a, b) for a, b in hops)
    machines = {cluster.machine_index_of(r) for r in ranks}
    match collective:
        case "all_reduce":
            return CollectiveFit(2 * (n - 1) * latency, 2 * (n - 1) / n / slowest)
        case "all_gather" | "reduce_scatter":
            return CollectiveFit((n - 1) * latency, (n - 1) / n / slowest)
        case "broadcast":
            return CollectiveFit((n - 1) * latency, 1 / slowest)
        case "all_to_all":
            if len(machines) == 1:
                return CollectiveFit((n - 1) * latency, (n - 1) / n**2 / slowest)
            # each machine's NIC carries what its ranks send to the others
            load = max(
                sum(1 for r in ranks if cluster.machine_index_of(r) == m)
                * sum(1 for r in ranks if cluster.machine_index_of(r) != m)
                for m in machines
            )
            return CollectiveFit((n - 1) * latency, load / n**2 / slowest)
    raise ValueError(f"unknown collective {collective!r}")
