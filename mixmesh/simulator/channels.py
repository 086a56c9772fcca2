"""The process groups of a simulated step, the links that they share, and their calls."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost import CostModel
from ..cost.exchanges import Exchange
from ..cost.resources import Link, links_of
from .values import Call

# collectives whose result is a new buffer of about all of the bytes, on every rank
RECEIVED_IN_NEW = ("all_gather", "reduce_scatter")


class Channels:
    """The channels of a step, one per process group, and the links that they cross; both have numbers."""

    def __init__(self, costs: CostModel, rests: Sequence[tuple[float, float]]) -> None:
        """``rests`` has, for each rank, its burst credit in seconds and its speed while that lasts."""
        self.costs, self.rests = costs, rests
        self.numbers: dict[tuple[str, tuple[int, ...]], int] = {}  # by purpose and ranks
        self.rivals: list[list[int]] = []  # for each channel, others that cross some of its links
        self.crossed: list[frozenset[int]] = []  # for each channel, the links that it crosses
        self.crossing: list[list[int]] = []  # for each link, the channels that cross it
        self.links: dict[Link, int] = {}
        self._calls: dict[tuple[str, Exchange, bool], Call] = {}
        self._s_per_byte: dict[tuple, dict[Link, float]] = {}

    def call(self, exchange: Exchange, purpose: str = "data", *, has_nodes: bool = False) -> Call:
        """A collective of a group with this ``purpose``. It ``has_nodes`` of autograd if it belongs to a
        redistribution of the program that passes do."""
        key = (purpose, exchange, has_nodes)
        if key not in self._calls:
            self._calls[key] = self._call(purpose, exchange, has_nodes)
        return self._calls[key]

    def _call(self, purpose: str, exchange: Exchange, has_nodes: bool) -> Call:
        kind = (exchange.performed, exchange.ranks, exchange.sent)
        if kind not in self._s_per_byte:
            self._s_per_byte[kind] = exchange.link_s_per_byte(self.costs.cluster)
        name, ranks, size_bytes = exchange.performed, exchange.ranks, exchange.size_bytes
        class_of = self.costs.class_of  # devices of one class spend equally long
        each = {class_of[r]: r for r in ranks}.items()
        alone = max((self.costs.exchange_alone_s(r, name, ranks, size_bytes) for _, r in each), default=0.0)
        # seconds that the computing threads spend on it are counted there
        lag_s = exchange.lag_s(self.costs)
        seconds = max(exchange.seconds(self.costs) - lag_s - alone, 0.0)
        # at most as long as the collective itself, which may have been measured as faster than the cluster
        # file allows
        links = [(link, min(s * size_bytes, seconds)) for link, s in self._s_per_byte[kind].items()]
        host = {c: self.costs.exchange_host_s(r, name, ranks, size_bytes) / 2 for c, r in each}
        if has_nodes:
            host = {c: host[c] + self.costs.redistribution_s(r) / 2 for c, r in each}
        if exchange.joined:
            host = {c: host[c] + self.costs.join_s(r, size_bytes) / 2 for c, r in each}
        if name in RECEIVED_IN_NEW:
            host = {c: host[c] + self.costs.new_pages_s(r, size_bytes) / 2 for c, r in each}
        # a device that computes while gradients travel gains no burst credit that this could use up
        overlapped = {
            c: self.costs.exchange_beside_s(r, name, ranks, size_bytes) / 2
            for c, r in each
            if self.rests[r][0] and purpose != "gradient"
        }
        channel = self.channel(purpose, exchange.ranks)
        return Call(
            exchange,
            channel,
            seconds,
            tuple((self.links[link], s) for link, s in links),
            max((s for _, s in links), default=0.0),
            purpose == "gradient",
            tuple([host[class_of[r]] for r in ranks]) if any(host.values()) else (),
            tuple([overlapped.get(class_of[r], 0.0) for r in ranks]) if any(overlapped.values()) else (),
            lag_s,
        )

    def channel(self, purpose: str, ranks: tuple[int, ...], one_way: Exchange | None = None) -> int:
        """The number of a process group; all groups are numbered before the first step is simulated. A
        ``one_way`` group crosses only the links of that exchange."""
        key = (purpose, ranks)
        if key not in self.numbers:
            number = self.numbers[key] = len(self.numbers)
            cluster = self.costs.cluster
            crossed = set(one_way.link_s_per_byte(cluster) if one_way else links_of(cluster, ranks))
            mine = frozenset(self.links.setdefault(link, len(self.links)) for link in sorted(crossed))
            self.crossing += [[] for _ in range(len(self.crossing), len(self.links))]
            self.rivals.append(sorted({other for link in mine for other in self.crossing[link]}))
            for other in self.rivals[number]:
                self.rivals[other].append(number)
            for link in mine:
                self.crossing[link].append(number)
            self.crossed.append(mine)
        return self.numbers[key]
